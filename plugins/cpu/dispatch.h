// What the ops share: the instruction set in use, error messages, checks of a cache.
#pragma once

#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "tasks.h"

namespace dustin {

// The instruction set in use.
const Isa& isa();

// An argument that cannot be worked with; becomes a status and dustin_last_error.
class Refused : public std::runtime_error {
 public:
  Refused(DustinStatus status, const std::string& message)
      : std::runtime_error(message), status(status) {}
  const DustinStatus status;
};

// Remembers the message for dustin_last_error and returns the status.
int32_t report(DustinStatus status, const char* message) noexcept;

// Runs an op's body and turns what it throws into a status: nothing leaves through the C ABI.
template <class Body>
int32_t guarded(const Body& body) noexcept {
  try {
    body();
    return DUSTIN_OK;
  } catch (const Refused& refused) {
    return report(refused.status, refused.what());
  } catch (const std::bad_alloc&) {
    return report(DUSTIN_OUT_OF_MEMORY, "no memory for the kernels' scratch space");
  } catch (const std::length_error&) {  // what a vector of absurd size throws
    return report(DUSTIN_OUT_OF_MEMORY, "no memory can hold arguments of this size");
  }
}

// Refuses an argument; `parts` make up the message. Called only where something is wrong: a message
// costs more than a check.
template <DustinStatus kStatus = DUSTIN_INVALID_ARGUMENT, class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Refused(kStatus, message.str());
}

inline void refuse_null(const void* p, const char* name) {
  if (!p) refuse(name, " is null");
}

inline void refuse_below(int64_t value, int64_t least, const char* name) {
  if (value < least) refuse(name, " is ", value, ", must be at least ", least);
}

// What every call has.
inline void check_call(int32_t dtype, int32_t threads) {
  refuse_below(threads, 1, "threads");
  if (dtype < DUSTIN_FLOAT32 || dtype > DUSTIN_BFLOAT16)
    refuse<DUSTIN_UNSUPPORTED>("dtype ", dtype,
                               " is none of float32 (0), float16 (1), bfloat16 (2)");
}

// Shapes, pointers, lengths, and the pages of each row's first lengths[b] + new_tokens tokens.
void check_cache(const DustinKvCache& cache, bool reads_values, int new_tokens, int32_t threads);

// Bytes of an element.
inline int64_t element_size(int32_t dtype) { return dtype == DUSTIN_FLOAT32 ? 4 : 2; }

inline void* advance(void* base, int64_t elements, int32_t dtype) {
  return static_cast<char*>(base) + elements * element_size(dtype);
}
inline const void* advance(const void* base, int64_t elements, int32_t dtype) {
  return static_cast<const char*>(base) + elements * element_size(dtype);
}

// The tokens of batch row b and KV head h.
inline Tokens tokens_of(const DustinKvCache& cache, int b, int h) {
  const int64_t head = h * cache.head_stride;
  return {advance(cache.k, head, cache.dtype),
          cache.v ? advance(cache.v, head, cache.dtype) : nullptr,
          cache.page_table + b * cache.page_table_stride,
          cache.page_stride,
          cache.token_stride,
          cache.page_size};
}

}  // namespace dustin
