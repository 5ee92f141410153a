#include "log.h"

#include <atomic>
#include <cstdio>
#include <string>

#include "status.h"

namespace dustin::tensorrt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> g_finder{nullptr};

}  // namespace

void use_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { g_finder = finder; }

void log(Severity severity, const char* op, const char* message) noexcept {
  if (message != dustin_last_error()) report(DUSTIN_INVALID_ARGUMENT, message);
  try {
    nvinfer1::ILoggerFinder* const finder = g_finder;
    if (nvinfer1::ILogger* const logger = finder ? finder->findLogger() : nullptr)
      return logger->log(severity, (std::string(op) + ": " + message).c_str());
  } catch (const std::exception&) {
    // No memory for the line, or no logger on this thread.
  }
  std::fprintf(stderr, "%s: %s\n", op, message);
}

}  // namespace dustin::tensorrt
