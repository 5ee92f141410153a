// What a result should be, in words.
#ifndef DUSTIN_TESTS_EXPECT_H_
#define DUSTIN_TESTS_EXPECT_H_

#include <sstream>
#include <string>

#include "check.h"
#include "inputs.h"
#include "reference.h"

inline std::string describe(const char* op, const Shape& shape) {
  std::ostringstream text;
  text << op << " " << name_of(shape.dtype) << " D=" << shape.head_dim << " heads=" << shape.heads()
       << "/" << shape.kv_heads << " page=" << shape.page_size << " w=" << shape.rows
       << " layout=" << shape.layout << " magnitude=" << shape.magnitude << " lengths=";
  for (const int32_t length : shape.lengths) text << length << " ";
  return text.str();
}

// Every element within the tolerances, absolute and relative.
inline void expect_attention(const Shape& shape, const Rows& out, const Guarded<float>& lse,
                             const Attention& want, double out_tol, double lse_tol) {
  size_t i = 0, j = 0;
  bool right = true;
  for (int b = 0; b < shape.batch(); ++b)
    for (int head = 0; head < shape.heads(); ++head)
      for (int row = 0; row < shape.rows; ++row, ++j) {
        const double got = lse[(b * shape.rows + row) * shape.heads() + head];
        right = right && near(got, want.lse[j], lse_tol, lse_tol, "lse");
        for (int d = 0; d < shape.head_dim; ++d, ++i)
          right = right && near(out(b, row, head, d), want.out[i], out_tol, out_tol, "out");
      }
  check(out.gaps_are_untouched(), "wrote between the heads of out");
}

#endif  // DUSTIN_TESTS_EXPECT_H_
