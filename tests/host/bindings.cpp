// The integer logic of csrc/common for Python. It needs no GPU and no CUDA headers: tests/host/build.py compiles it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <vector>

#include "common/block_range.h"
#include "common/tile_scheduler.h"
#include "fwd/fp8_layout.h"

namespace py = pybind11;

// Every tile of a launch as rows (cta, block, head_idx, batch_idx): CTA after CTA, each in the order of its work.
static py::array_t<int> all_tiles(fa3::TileSchedulerParams const& params) {
  std::vector<std::array<int, 4>> rows;
  for (int cta = 0; cta < params.num_ctas; ++cta) {
    fa3::TileScheduler scheduler(params, cta);
    for (fa3::Tile tile; scheduler.next(tile);) {
      rows.push_back({cta, tile.block, tile.head_idx, tile.batch_idx});
    }
  }
  py::array_t<int> table({static_cast<py::ssize_t>(rows.size()), py::ssize_t{4}});
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(), table.mutable_data(i));
  }
  return table;
}

PYBIND11_MODULE(fa3_host, m) {
  m.def("visible_keys", &fa3::visible_keys, py::arg("row"), py::arg("seqlen_q"), py::arg("seqlen_k"),
        py::arg("causal"));
  m.def("first_query", &fa3::first_query, py::arg("key"), py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("causal"));
  m.def(
      "block_range",
      [](int row_begin, int num_rows, int tile_n, int seqlen_q, int seqlen_k, bool causal) {
        fa3::BlockRange const range = fa3::block_range(row_begin, num_rows, tile_n, seqlen_q, seqlen_k, causal);
        return py::make_tuple(range.end, range.unmasked_end);
      },
      py::arg("row_begin"), py::arg("num_rows"), py::arg("tile_n"), py::arg("seqlen_q"), py::arg("seqlen_k"),
      py::arg("causal"));

  m.def("last_key_block", &fa3::last_key_block, py::arg("row_begin"), py::arg("num_rows"), py::arg("tile_n"),
        py::arg("seqlen_q"), py::arg("seqlen_k"));

  py::enum_<fa3::TileOrder>(m, "TileOrder")
      .value("kEqual", fa3::TileOrder::kEqual)
      .value("kAscending", fa3::TileOrder::kAscending)
      .value("kDescending", fa3::TileOrder::kDescending);
  py::class_<fa3::TileSchedulerParams>(m, "TileSchedulerParams")
      .def_readonly("num_blocks", &fa3::TileSchedulerParams::num_blocks)
      .def_readonly("num_ctas", &fa3::TileSchedulerParams::num_ctas)
      .def_readonly("section_heads", &fa3::TileSchedulerParams::section_heads)
      .def_readonly("rounds_per_section", &fa3::TileSchedulerParams::rounds_per_section)
      .def_readonly("num_rounds", &fa3::TileSchedulerParams::num_rounds);
  m.def("make_tile_scheduler", &fa3::make_tile_scheduler, py::arg("num_blocks"), py::arg("num_heads"), py::arg("batch"),
        py::arg("num_sms"), py::arg("order"), py::arg("section_heads"));
  m.def("heads_that_fill_rounds", &fa3::heads_that_fill_rounds, py::arg("num_blocks"), py::arg("num_head_batches"),
        py::arg("num_ctas"), py::arg("l2_heads"));
  m.def(
      "v_load_offset",
      [](int slab_bytes, int lane, int key, int channel, int tile_n) {
        return slab_bytes == 128 ? fa3::v_load_offset<128>(lane, key, channel, tile_n)
                                 : fa3::v_load_offset<64>(lane, key, channel, tile_n);
      },
      py::arg("slab_bytes"), py::arg("lane"), py::arg("key"), py::arg("channel"), py::arg("tile_n"));
  m.def("vt_store_offset", &fa3::vt_store_offset, py::arg("lane"), py::arg("key"), py::arg("channel"));
  m.def("first_accumulator_register", &fa3::first_accumulator_register, py::arg("i"));
  m.def("channel_bytes", &fa3::channel_bytes, py::arg("lane"), py::arg("which"));
  m.def("all_tiles", &all_tiles, py::arg("params"));
}
