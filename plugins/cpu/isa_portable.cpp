#define DUSTIN_ISA portable
#include "vec_portable.h"

#include "isa_table.h"

namespace dustin {
extern const Isa kPortable;
const Isa kPortable = portable::make_isa<portable::PlainMath<Bfloat16>>("portable");
}  // namespace dustin
