#include "status.h"

#include <cstdio>

namespace {
thread_local char t_error[256] = "";
}

int32_t dustin::report(DustinStatus status, const char* message) noexcept {
  std::snprintf(t_error, sizeof t_error, "%s", message);
  return status;
}

extern "C" const char* dustin_last_error(void) { return t_error; }

extern "C" int32_t dustin_abi_version(void) { return DUSTIN_ABI_VERSION; }
