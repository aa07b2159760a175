// The integer logic and the tables of csrc for Python. It needs no GPU and no CUDA headers: tests/host/build.py
// compiles it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <vector>

#include "bwd/tiles.h"
#include "common/fp8_format.h"
#include "common/hopper.h"
#include "common/mask.h"
#include "common/tile_scheduler.h"
#include "fwd/tiles.h"

namespace py = pybind11;

// Every tile of a launch as rows (cta, block, head_idx, batch_idx): CTA after CTA, each in the order of its work.
static py::array_t<int> all_tiles(fa3::TileSchedulerParams const& params) {
  std::vector<std::array<int, 4>> rows;
  for (int cta = 0; cta < params.num_ctas; ++cta) {
    fa3::StaticScheduler scheduler(params, cta);
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

static void bind_masks(py::module_& m) {
  m.attr("kUnlimited") = fa3::kUnlimited;
  py::class_<fa3::MaskParams>(m, "MaskParams")
      .def(py::init<int, int, int>(), py::arg("window_left"), py::arg("window_right"), py::arg("chunk"))
      .def("is_causal_or_none", &fa3::MaskParams::is_causal_or_none)
      .def("most_keys", &fa3::MaskParams::most_keys, py::arg("seqlen_k"));
  py::enum_<fa3::WorkTrend>(m, "WorkTrend")
      .value("kEven", fa3::WorkTrend::kEven)
      .value("kRising", fa3::WorkTrend::kRising)
      .value("kFalling", fa3::WorkTrend::kFalling);
  m.def("trend_of_queries", &fa3::trend_of_queries, py::arg("mask"));
  py::class_<fa3::BlockRange>(m, "BlockRange")
      .def(py::init<int, int, int, int>(), py::arg("begin"), py::arg("end"), py::arg("unmasked_begin"),
           py::arg("unmasked_end"))
      .def_readonly("begin", &fa3::BlockRange::begin)
      .def_readonly("end", &fa3::BlockRange::end)
      .def_readonly("unmasked_begin", &fa3::BlockRange::unmasked_begin)
      .def_readonly("unmasked_end", &fa3::BlockRange::unmasked_end)
      .def("empty", &fa3::BlockRange::empty)
      .def("needs_mask", &fa3::BlockRange::needs_mask, py::arg("block"));
  py::class_<fa3::Mask>(m, "Mask")
      .def(py::init([](fa3::MaskParams const& params, int seqlen_q, int seqlen_k) {
             return fa3::Mask(params, fa3::SeqlenInfo({1, seqlen_q, seqlen_k}, 0));
           }),
           py::arg("params"), py::arg("seqlen_q"), py::arg("seqlen_k"))
      .def(
          "keys_of",
          [](fa3::Mask const& mask, int query) {
            auto const keys = mask.keys_of(query);
            return py::make_tuple(keys.begin, keys.end);
          },
          py::arg("query"))
      .def(
          "queries_of",
          [](fa3::Mask const& mask, int key) {
            auto const queries = mask.queries_of(key);
            return py::make_tuple(queries.begin, queries.end);
          },
          py::arg("key"))
      .def("key_blocks", &fa3::Mask::key_blocks, py::arg("query"), py::arg("num_queries"), py::arg("tile_n"))
      .def("query_blocks", &fa3::Mask::query_blocks, py::arg("key"), py::arg("num_keys"), py::arg("tile_m"));
  py::class_<fa3::CausalMask>(m, "CausalMask")
      .def(py::init([](bool causal, int seqlen_q, int seqlen_k) {
             return fa3::CausalMask(causal, fa3::SeqlenInfo({1, seqlen_q, seqlen_k}, 0));
           }),
           py::arg("causal"), py::arg("seqlen_q"), py::arg("seqlen_k"))
      .def("end_of_keys", &fa3::CausalMask::end_of_keys, py::arg("query"))
      .def("key_blocks", &fa3::CausalMask::key_blocks, py::arg("query"), py::arg("num_queries"), py::arg("tile_n"));
  m.def("visited_blocks", &fa3::visited_blocks, py::arg("cta"), py::arg("own"));
  m.def(
      "queries_with_keys",
      [](fa3::MaskParams const& mask, int seqlen_q, int seqlen_k) {
        fa3::SeqlenInfo const seqlen = fa3::queries_with_keys({1, seqlen_q, seqlen_k}, mask, 0);
        return py::make_tuple(seqlen.first_q, seqlen.seqlen_q);
      },
      py::arg("mask"), py::arg("seqlen_q"), py::arg("seqlen_k"));
}

static void bind_schedulers(py::module_& m) {
  py::enum_<fa3::TileOrder>(m, "TileOrder")
      .value("kEqual", fa3::TileOrder::kEqual)
      .value("kAscending", fa3::TileOrder::kAscending)
      .value("kDescending", fa3::TileOrder::kDescending);
  py::class_<fa3::TileSchedulerParams>(m, "TileSchedulerParams")
      .def_readonly("num_blocks", &fa3::TileSchedulerParams::num_blocks)
      .def_readonly("num_ctas", &fa3::TileSchedulerParams::num_ctas)
      .def_readonly("heads_per_l2_group", &fa3::TileSchedulerParams::heads_per_l2_group)
      .def_readonly("waves_per_l2_group", &fa3::TileSchedulerParams::waves_per_l2_group)
      .def_readonly("num_waves", &fa3::TileSchedulerParams::num_waves);
  m.def("make_tile_scheduler", &fa3::make_tile_scheduler, py::arg("num_blocks"), py::arg("num_heads"), py::arg("batch"),
        py::arg("num_sms"), py::arg("order"), py::arg("heads_per_l2_group"));
  m.def("heads_that_fill_waves", &fa3::heads_that_fill_waves, py::arg("num_blocks"), py::arg("num_batch_heads"),
        py::arg("num_ctas"), py::arg("l2_heads"));
  m.def("all_tiles", &all_tiles, py::arg("params"));
}

// The tables of tiles, by the name of what is built of each: fwd_bf16_hdim64_short is made of
// FWD_TILES["hdim64_short"].
static void bind_tiles(py::module_& m) {
  namespace fwd = fa3::fwd;
  namespace bwd = fa3::bwd;
  py::enum_<fwd::Schedule>(m, "Schedule")
      .value("kOverlapped", fwd::Schedule::kOverlapped)
      .value("kSerial", fwd::Schedule::kSerial);
  py::enum_<fwd::VLayout>(m, "VLayout")
      .value("kRows", fwd::VLayout::kRows)
      .value("kConverted", fwd::VLayout::kConverted)
      .value("kTransposed", fwd::VLayout::kTransposed);
  py::enum_<fwd::OutBuffer>(m, "OutBuffer")
      .value("kOwn", fwd::OutBuffer::kOwn)
      .value("kAliasesQ", fwd::OutBuffer::kAliasesQ);
  py::class_<fwd::FwdTile>(m, "FwdTile")
      .def_readonly("rank", &fwd::FwdTile::rank)
      .def_readonly("consumer_warpgroups", &fwd::FwdTile::consumer_warpgroups)
      .def_readonly("tile_n", &fwd::FwdTile::tile_n)
      .def_readonly("stages_q", &fwd::FwdTile::stages_q)
      .def_readonly("stages_kv", &fwd::FwdTile::stages_kv)
      .def_readonly("out_buffer", &fwd::FwdTile::out_buffer)
      .def_readonly("out_slabs", &fwd::FwdTile::out_slabs)
      .def_readonly("schedule", &fwd::FwdTile::schedule)
      .def_readonly("v_layout", &fwd::FwdTile::v_layout)
      .def_readonly("stages_v_rows", &fwd::FwdTile::stages_v_rows)
      .def_readonly("pv_slice_columns", &fwd::FwdTile::pv_slice_columns)
      .def_readonly("max_seqlen_k_full", &fwd::FwdTile::max_seqlen_k_full)
      .def_readonly("max_seqlen_k_causal", &fwd::FwdTile::max_seqlen_k_causal);
  m.def("fwd_tiles", [] {
    py::dict tiles;
    tiles["hdim64_short"] = fwd::kHdim64Short;
    tiles["hdim64_long"] = fwd::kHdim64Long;
    tiles["hdim96"] = fwd::kHdim96;
    tiles["hdim128_short"] = fwd::kHdim128Short;
    tiles["hdim128_long"] = fwd::kHdim128Long;
    tiles["hdim192"] = fwd::kHdim192;
    tiles["hdim256_short"] = fwd::kHdim256Short;
    tiles["hdim256_long"] = fwd::kHdim256Long;
    return tiles;
  });
  m.def("fwd_e4m3_tiles", [] {
    py::dict tiles;
    tiles["hdim64"] = fwd::kE4m3Hdim64;
    tiles["hdim128"] = fwd::kE4m3Hdim128;
    tiles["hdim256"] = fwd::kE4m3Hdim256;
    tiles["hdim64_vt"] = fwd::kE4m3Hdim64Vt;
    tiles["hdim128_vt"] = fwd::kE4m3Hdim128Vt;
    tiles["hdim256_vt"] = fwd::kE4m3Hdim256Vt;
    return tiles;
  });
  py::enum_<bwd::OperandSource>(m, "OperandSource")
      .value("kSharedMemory", bwd::OperandSource::kSharedMemory)
      .value("kRegisters", bwd::OperandSource::kRegisters);
  py::class_<bwd::BwdTile>(m, "BwdTile")
      .def_readonly("rank", &bwd::BwdTile::rank)
      .def_readonly("tile_m", &bwd::BwdTile::tile_m)
      .def_readonly("tile_n", &bwd::BwdTile::tile_n)
      .def_readonly("stages_q", &bwd::BwdTile::stages_q)
      .def_readonly("stages_dout", &bwd::BwdTile::stages_dout)
      .def_readonly("stages_ds", &bwd::BwdTile::stages_ds)
      .def_readonly("dq_columns", &bwd::BwdTile::dq_columns)
      .def_readonly("v_in_dp", &bwd::BwdTile::v_in_dp)
      .def_readonly("ds_in_dk", &bwd::BwdTile::ds_in_dk);
  m.def("bwd_tiles", [] {
    py::dict tiles;
    tiles["hdim64"] = bwd::kHdim64;
    tiles["hdim96"] = bwd::kHdim96;
    tiles["hdim128"] = bwd::kHdim128;
    tiles["hdim192"] = bwd::kHdim192;
    tiles["hdim256"] = bwd::kHdim256;
    return tiles;
  });
}

static void bind_fp8_format(py::module_& m) {
  m.attr("kFp8ScaleRows") = fa3::kFp8ScaleRows;
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
}

PYBIND11_MODULE(fa3_host, m) {
  bind_masks(m);
  bind_schedulers(m);
  bind_tiles(m);
  bind_fp8_format(m);
  m.def(
      "packed_sequence",
      [](int first, int length) {
        fa3::TmaRows const rows = fa3::packed_sequence(first, length);
        return py::make_tuple(rows.row_origin, rows.wrap, rows.outer);
      },
      py::arg("first"), py::arg("length"));
}
