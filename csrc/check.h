// Checks that throw, for host code; the message says what was wrong. No torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define FA3_CHECK(condition, message)                             \
  do {                                                            \
    if (!(condition)) {                                           \
      throw std::runtime_error(std::string("fa3: ") + (message)); \
    }                                                             \
  } while (0)

#define FA3_CHECK_CUDA(call)                                                                                \
  do {                                                                                                      \
    cudaError_t const error = (call);                                                                       \
    FA3_CHECK(error == cudaSuccess, std::string(#call) + " failed with " + cudaGetErrorName(error) + " (" + \
                                        cudaGetErrorString(error) + ") at " + __FILE__ + ":" +              \
                                        std::to_string(__LINE__));                                          \
  } while (0)

namespace fa3 {

// The checks of one op. Each throws `<op>: <argument> must <rule>, got <value>`.
struct ArgumentCheck {
  char const* op;

  void operator()(bool condition, char const* argument, std::string const& rule, std::string const& got) const {
    FA3_CHECK(condition, std::string(op) + ": " + argument + " must " + rule + ", got " + got);
  }
};

}  // namespace fa3
