// The built kernels, and which of them a call takes, for `python -m fa3` and `fa3.explain`. Exported with a C
// interface, for ctypes: they must work without a GPU.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bwd/kernels.h"
#include "fwd/kernels.h"
#include "ops/mask_argument.h"

#define FA3_EXPORT extern "C" __attribute__((visibility("default")))

namespace fa3 {
namespace {

std::string to_json(char const* text) { return std::string("\"") + text + "\""; }
std::string to_json(int number) { return std::to_string(number); }

char const* short_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16:
      return "fp16";
    case Dtype::kBFloat16:
      return "bf16";
    case Dtype::kFloat8E4M3:
      return "e4m3";
  }
  return "unknown";
}

std::string row_of(char const* pass, KernelInfo const& info) {
  std::vector<std::pair<char const*, std::string>> const fields{
      {"name", to_json(info.name)},
      {"pass", to_json(pass)},
      {"dtype", to_json(short_name(info.dtype))},
      {"head_dim", to_json(info.head_dim)},
      {"head_dim_v", to_json(info.head_dim_v)},
      {"tile_m", to_json(info.tile_m)},
      {"tile_n", to_json(info.tile_n)},
      {"stages", to_json(info.stages)},
      {"consumer_warpgroups", to_json(info.consumer_warpgroups)},
      {"smem_bytes", to_json(info.smem_bytes)},
  };
  std::string row;
  for (auto const& [name, value] : fields) {
    row += (row.empty() ? "{" : ", ") + to_json(name) + ": " + value;
  }
  return row + "}";
}

std::string table() {
  std::string rows;
  auto const add = [&](std::string const& row) { rows += (rows.empty() ? "" : ", ") + row; };
  for (fwd::Kernel const& kernel : fwd::Kernels::rows()) {
    add(row_of("fwd", kernel.info));
  }
  for (bwd::Kernel const& kernel : bwd::Kernels::rows()) {
    add(row_of("bwd", kernel.info));
  }
  return "[" + rows + "]";
}

// The index of the row that serves the problem, -1 if none does.
template <class Kernels, class Problem>
int select_row(Problem const& problem) {
  auto const* selected = Kernels::select(problem);
  return selected == nullptr ? -1 : static_cast<int>(selected - Kernels::rows().data());
}

}  // namespace
}  // namespace fa3

// A JSON list with an object per kernel: those of the forward, then those of the backward.
FA3_EXPORT char const* fa3_kernel_table() {
  static std::string const json = fa3::table();
  return json.c_str();
}

// The row of fa3_kernel_table that a forward call takes; -1 if no kernel serves it, or no kernel has the mask. `dtype`:
// 0 float16, 1 bfloat16, 2 float8_e4m3fn. The other arguments are the op's.
FA3_EXPORT int fa3_select_fwd_kernel(int dtype, int head_dim, int head_dim_v, int seqlen_q, int seqlen_k,
                                     int window_left, int window_right, int attention_chunk, bool v_transposed) {
  try {
    return fa3::select_row<fa3::fwd::Kernels>(fa3::fwd::Problem{
        .dtype = static_cast<fa3::Dtype>(dtype),
        .head_dim = head_dim,
        .head_dim_v = head_dim_v,
        .seqlen_k = seqlen_k,
        .mask = fa3::make_mask({"fwd"}, window_left, window_right, attention_chunk, seqlen_q, seqlen_k),
        .v_transposed = v_transposed,
    });
  } catch (std::runtime_error const&) {  // of make_mask; a C function must not throw
    return -1;
  }
}

// The same for a backward call.
FA3_EXPORT int fa3_select_bwd_kernel(int dtype, int head_dim, int head_dim_v) {
  int const row = fa3::select_row<fa3::bwd::Kernels>(fa3::bwd::Problem{
      .dtype = static_cast<fa3::Dtype>(dtype),
      .head_dim = head_dim,
      .head_dim_v = head_dim_v,
  });
  return row == -1 ? -1 : static_cast<int>(fa3::fwd::Kernels::rows().size()) + row;
}
