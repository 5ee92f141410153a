// What the plugins have to say goes to TensorRT's logger, one line each, the op's name in front.
#pragma once

#include <NvInferRuntime.h>

#include <exception>

namespace dustin::tensorrt {

using Severity = nvinfer1::ILogger::Severity;

// Whose logger to take; where there is none, lines go to stderr.
void use_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// dustin_last_error has the message as well: while a network is made TensorRT names no logger.
void log(Severity severity, const char* op, const char* message) noexcept;

// What `body` returns; where it throws, the reason is logged and `otherwise` returned: TensorRT's
// interface takes no exceptions.
template <class Result, class Body>
Result or_logged(const char* op, Result otherwise, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log(Severity::kERROR, op, error.what());
    return otherwise;
  }
}

}  // namespace dustin::tensorrt
