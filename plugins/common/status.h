// What an argument that cannot be worked with becomes: a status and dustin_last_error.
#pragma once

#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "dustin/kernels.h"

namespace dustin {

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

}  // namespace dustin
