// The built kernels, and which of them a call takes, with a C interface.
#include <string>

#include "bwd/kernels.h"
#include "fwd/kernels.h"

// For `python -m fa3` and `fa3.explain`, through ctypes: they must work without a GPU.
#define FA3_EXPORT extern "C" __attribute__((visibility("default")))

static char const* dtype_name(fa3::Dtype dtype) {
  return dtype == fa3::Dtype::kFloat8E4M3 ? "e4m3" : dtype == fa3::Dtype::kBFloat16 ? "bf16" : "fp16";
}

// The built kernels as a JSON list: those of the forward, then those of the backward.
FA3_EXPORT char const* fa3_kernel_table() {
  static std::string const table = [] {
    std::string json = "[";
    auto const add = [&](char const* pass, fa3::KernelInfo const& info) {
      auto const text = [](char const* name, char const* value) {
        return std::string("\"") + name + "\": \"" + value + "\"";
      };
      auto const number = [](char const* name, int value) {
        return std::string(", \"") + name + "\": " + std::to_string(value);
      };
      json += std::string(json.size() > 1 ? ", {" : "{") + text("name", info.name) + ", " + text("pass", pass) + ", " +
              text("dtype", dtype_name(info.dtype)) + number("head_dim", info.head_dim) +
              number("tile_m", info.tile_m) + number("tile_n", info.tile_n) + number("stages", info.stages) +
              number("consumer_warpgroups", info.consumer_warpgroups) + number("smem_bytes", info.smem_bytes) + "}";
    };
    for (fa3::FwdKernel const& kernel : fa3::fwd_kernels()) {
      add("fwd", kernel.info);
    }
    for (fa3::BwdKernel const& kernel : fa3::bwd_kernels()) {
      add("bwd", kernel.info);
    }
    return json + "]";
  }();
  return table.c_str();
}

// Row of fa3_kernel_table that a forward call takes, or -1. `dtype`: 0 float16, 1 bfloat16, 2 float8_e4m3fn.
FA3_EXPORT int fa3_select_fwd_kernel(int dtype, int head_dim, int seqlen_k, bool causal, bool v_transposed) {
  fa3::FwdKernel const* selected =
      fa3::select_fwd_kernel(static_cast<fa3::Dtype>(dtype), head_dim, seqlen_k, causal, v_transposed);
  return selected == nullptr ? -1 : static_cast<int>(selected - fa3::fwd_kernels().data());
}

// The same for a backward call.
FA3_EXPORT int fa3_select_bwd_kernel(int dtype, int head_dim) {
  fa3::BwdKernel const* selected = fa3::select_bwd_kernel(static_cast<fa3::Dtype>(dtype), head_dim);
  return selected == nullptr ? -1
                             : static_cast<int>(fa3::fwd_kernels().size() + (selected - fa3::bwd_kernels().data()));
}
