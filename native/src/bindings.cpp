// The Python module pinnate._native (typed by src/pinnate/_native.pyi). Converts arguments, releases the GIL; decides
// nothing.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"
#include "peaks.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pinnate {
namespace {

// A contiguous buffer of a Python object, held for the length of a call.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // All elements, flat. `format` is the struct character that numpy gives the type, 0 for records.
  template <class T>
  std::span<T> as(char format) const {
    const bool fits = view_.itemsize == static_cast<Py_ssize_t>(sizeof(T)) && (format == 0 || *view_.format == format);
    if (!fits) throw std::invalid_argument(std::string("an array has format '") + view_.format + "'");
    return {static_cast<T*>(view_.buf), static_cast<size_t>(view_.len) / sizeof(T)};
  }
  const unsigned char* bytes() const { return static_cast<const unsigned char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

template <class T, size_t N>
T named(const std::string& name, const std::array<std::pair<const char*, T>, N>& names) {
  for (const auto& [known, value] : names)
    if (name == known) return value;
  throw std::invalid_argument("program: unknown name '" + name + "'");
}

constexpr std::array<std::pair<const char*, Act>, 2> kActs{{{"float32", Act::kF32}, {"bfloat16", Act::kBF16}}};
constexpr std::array<std::pair<const char*, WeightFormat>, 3> kFormats{
    {{"act", WeightFormat::kAct}, {"int8", WeightFormat::kInt8}, {"int4", WeightFormat::kInt4}}};
constexpr std::array<std::pair<const char*, Epilogue>, 4> kEpilogues{{{"store_f32", Epilogue::kStoreF32},
                                                                      {"add_f32", Epilogue::kAddF32},
                                                                      {"store_act", Epilogue::kStoreAct},
                                                                      {"swiglu", Epilogue::kSwiGLUAct}}};
constexpr std::array<std::pair<const char*, Unary>, 4> kUnaries{{{"gelu_tanh", Unary::kGeluTanh},
                                                                 {"gelu_erf", Unary::kGeluErf},
                                                                 {"softcap", Unary::kSoftcap},
                                                                 {"scale", Unary::kScale}}};
constexpr std::array<std::pair<const char*, Binary>, 3> kBinaries{
    {{"add", Binary::kAdd}, {"mul", Binary::kMul}, {"swiglu", Binary::kSwiGLU}}};

nb::dict cpu_features() {
  const CpuInfo& info = cpu_info();
  nb::dict out;
  out["model"] = info.model;
  out["flags"] = info.flags;
  out["isas"] = info.isas;
  return out;
}

nb::object dequantize(int type, nb::handle data, int64_t count, const std::string& isa) {
  const Buffer source(data, false);
  const TensorType storage = static_cast<TensorType>(type);
  if (count < 0 || row_bytes(storage, count) > source.size()) throw std::invalid_argument("dequantize: too few bytes");
  const KernelTable& kernels = select_kernels(isa.c_str());
  float* out = new float[static_cast<size_t>(std::max<int64_t>(count, 1))];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    nb::gil_scoped_release release;
    kernels.dequantize(storage, source.bytes(), count, out);
  }
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>(out, {static_cast<size_t>(count)}, owner));
}

nb::dict peaks(int threads, const std::string& isa, double seconds) {
  const KernelTable& kernels = select_kernels(isa.c_str());
  Peaks found;
  {
    nb::gil_scoped_release release;
    found = measure_peaks(kernels, threads, seconds);
  }
  nb::dict out;
  out["bf16_gflops"] = found.bf16_gflops;
  out["f32_gflops"] = found.f32_gflops;
  out["int8_gops"] = found.int8_gops;
  out["read_gbs"] = found.read_gbs;
  return out;
}

// sources: (type, bytes, rows, cols, row order as int32 or None)
int add_weight(Program& program, nb::list sources, bool swiglu, const std::string& format) {
  const WeightFormat stored = named(format, kFormats);
  std::vector<std::unique_ptr<Buffer>> held;
  std::vector<SourceMatrix> matrices;
  for (nb::handle item : sources) {
    const nb::tuple source = nb::cast<nb::tuple>(item);
    SourceMatrix m{static_cast<TensorType>(nb::cast<int>(source[0])), nullptr, nb::cast<int64_t>(source[2]),
                   nb::cast<int64_t>(source[3])};
    held.push_back(std::make_unique<Buffer>(source[1], false));
    m.data = held.back()->bytes();
    if (m.rows < 1 || m.cols < 1 || row_bytes(m.type, m.cols) * static_cast<size_t>(m.rows) > held.back()->size())
      throw std::invalid_argument("add_weight: too few bytes");
    if (!source[4].is_none()) {
      held.push_back(std::make_unique<Buffer>(source[4], false));
      const auto order = held.back()->as<const int32_t>('i');
      const auto inside = [&](int32_t row) { return row >= 0 && row < m.rows; };
      if (order.size() != static_cast<size_t>(m.rows) || !std::all_of(order.begin(), order.end(), inside))
        throw std::invalid_argument("add_weight: row order out of range");
      m.row_order = order.data();
    }
    matrices.push_back(m);
  }
  nb::gil_scoped_release release;
  return program.add_weight(matrices, swiglu, stored);
}

int add_vector(Program& program, nb::handle data) {
  const Buffer buffer(data, false);
  const auto values = buffer.as<const float>('f');
  return program.add_vector(values.data(), static_cast<int64_t>(values.size()));
}

int add_rope_table(Program& program, nb::handle cos, nb::handle sin, int64_t pairs) {
  const Buffer first(cos, false), second(sin, false);
  const auto a = first.as<const float>('f'), b = second.as<const float>('f');
  if (pairs < 1 || a.size() != b.size() || a.size() % static_cast<size_t>(pairs) != 0)
    throw std::invalid_argument("add_rope_table: cos and sin are not [positions, pairs]");
  return program.add_rope_table(a.data(), b.data(), static_cast<int64_t>(a.size()) / pairs, pairs);
}

// The bytes of `pages` (int32), copied without the GIL.
void read_pages(const Program& program, nb::handle pages, nb::handle out) {
  const Buffer ids(pages, false), target(out, true);
  const auto indices = ids.as<const int32_t>('i');
  if (target.size() != indices.size() * static_cast<size_t>(program.page_bytes()))
    throw std::invalid_argument("read_pages: the buffer does not have the pages' size");
  unsigned char* bytes = target.as<unsigned char>('B').data();
  nb::gil_scoped_release release;
  program.read_pages(indices, bytes);
}

void write_pages(Program& program, nb::handle pages, nb::handle data) {
  const Buffer ids(pages, false), source(data, false);
  const auto indices = ids.as<const int32_t>('i');
  if (source.size() != indices.size() * static_cast<size_t>(program.page_bytes()))
    throw std::invalid_argument("write_pages: the buffer does not have the pages' size");
  nb::gil_scoped_release release;
  program.write_pages(indices, source.bytes());
}

// inputs and outputs in the order of _native.pyi
void run(Program& program, nb::tuple inputs, nb::tuple outputs, nb::handle logits, nb::handle await_masks) {
  if (inputs.size() != 14 || outputs.size() != 5) throw std::invalid_argument("run: 14 inputs and 5 outputs");
  const auto in = [&](size_t i) { return Buffer(inputs[i], false); };
  const auto out = [&](size_t i) { return Buffer(outputs[i], true); };
  const Buffer ins[14] = {in(0), in(1), in(2), in(3), in(4),  in(5),  in(6),
                          in(7), in(8), in(9), in(10), in(11), in(12), in(13)};
  const Buffer outs[5] = {out(0), out(1), out(2), out(3), out(4)};
  const auto ints = [&](size_t i) { return ins[i].as<const int32_t>('i'); };
  Step step;
  step.tokens = ints(0), step.positions = ints(1), step.slots = ints(2);
  step.seq_starts = ints(3), step.contexts = ints(4), step.page_offsets = ints(5), step.page_indices = ints(6);
  step.copies = ints(7), step.logit_rows = ints(8);
  step.samples = ins[9].as<const SampleRecord>(0);
  step.history = ints(10), step.bias_ids = ints(11), step.bias = ins[12].as<const float>('f');
  step.masks = ins[13].as<const uint32_t>('I');
  if (!await_masks.is_none())
    step.await_masks = [await_masks] {
      const nb::gil_scoped_acquire acquire;
      await_masks();
    };
  step.out_tokens = outs[0].as<int32_t>('i'), step.out_logprobs = outs[1].as<float>('f');
  step.out_ranks = outs[2].as<int32_t>('i'), step.out_top_ids = outs[3].as<int32_t>('i');
  step.out_top_logprobs = outs[4].as<float>('f');
  std::unique_ptr<Buffer> all;
  if (!logits.is_none()) {
    all = std::make_unique<Buffer>(logits, true);
    const auto values = all->as<float>('f');
    if (values.size() != step.logit_rows.size() * static_cast<size_t>(program.vocab()))
      throw std::invalid_argument("run: logits are not [R, vocab]");
    step.out_logits = values.data();
  }
  nb::gil_scoped_release release;
  program.run(step);
}

void bind_instructions(nb::class_<Program>& c) {
  c.def("embed", [](Program& p, int weight, float scale, int64_t out) { p.emit(EmbedOp{weight, scale, out}); },
        nb::kw_only(), "weight"_a, "scale"_a, "out"_a);
  c.def("gemm", [](Program& p, int weight, int bias, const std::string& epilogue, int64_t x, int64_t out) {
          p.emit(GemmOp{weight, bias, named(epilogue, kEpilogues), x, out});
        }, nb::kw_only(), "weight"_a, "bias"_a, "epilogue"_a, "x"_a, "out"_a);
  c.def("norm", [](Program& p, bool layer, int weight, int bias, float eps, int64_t cols, int64_t group, int64_t x,
                   int64_t out, bool out_f32) {
          p.emit(NormOp{layer, weight, bias, eps, cols, group, x, out, out_f32});
        }, nb::kw_only(), "layer"_a, "weight"_a, "bias"_a, "eps"_a, "cols"_a, "group"_a, "x"_a, "out"_a, "out_f32"_a);
  c.def("unary", [](Program& p, const std::string& op, float parameter, int64_t cols, int64_t x, int64_t out) {
          p.emit(UnaryOp{named(op, kUnaries), parameter, cols, x, out});
        }, nb::kw_only(), "op"_a, "parameter"_a, "cols"_a, "x"_a, "out"_a);
  c.def("binary", [](Program& p, const std::string& op, int64_t cols, int64_t a, int64_t b, int64_t out) {
          p.emit(BinaryOp{named(op, kBinaries), cols, a, b, out});
        }, nb::kw_only(), "op"_a, "cols"_a, "a"_a, "b"_a, "out"_a);
  c.def("convert", [](Program& p, bool to_act, int64_t cols, int64_t x, int64_t out) {
          p.emit(ConvertOp{to_act, cols, x, out});
        }, nb::kw_only(), "to_act"_a, "cols"_a, "x"_a, "out"_a);
  c.def("rope", [](Program& p, int table, int64_t cols, int64_t head_dim, int64_t x, int64_t out) {
          p.emit(RopeOp{table, cols, head_dim, x, out});
        }, nb::kw_only(), "table"_a, "cols"_a, "head_dim"_a, "x"_a, "out"_a);
  c.def("copy_columns", [](Program& p, int64_t cols, int64_t out_cols, int64_t at, int64_t x, int64_t out) {
          p.emit(CopyColumnsOp{cols, out_cols, at, x, out});
        }, nb::kw_only(), "cols"_a, "out_cols"_a, "at"_a, "x"_a, "out"_a);
  c.def("qkv", [](Program& p, int layer, int num_heads, int q_norm, int k_norm, float eps, int table, int64_t x,
                  int64_t out) { p.emit(QKVOp{layer, num_heads, q_norm, k_norm, eps, table, x, out}); },
        nb::kw_only(), "layer"_a, "num_heads"_a, "q_norm"_a, "k_norm"_a, "eps"_a, "table"_a, "x"_a, "out"_a);
  c.def("attention", [](Program& p, int layer, int num_heads, float scale, int window, float softcap, int64_t q,
                        int64_t out) { p.emit(AttentionOp{layer, num_heads, scale, window, softcap, q, out}); },
        nb::kw_only(), "layer"_a, "num_heads"_a, "scale"_a, "window"_a, "softcap"_a = 0.0f, "q"_a, "out"_a);
  c.def("gather", [](Program& p, int64_t cols, int64_t x, int64_t out) { p.emit(GatherOp{cols, x, out}); },
        nb::kw_only(), "cols"_a, "x"_a, "out"_a);
}

}  // namespace
}  // namespace pinnate

NB_MODULE(_native, m) {
  using namespace pinnate;
  m.def("cpu_features", &cpu_features);
  m.def("dequantize", &dequantize, "type"_a, "data"_a, "count"_a, "isa"_a = "auto");
  m.def("measure_peaks", &peaks, "threads"_a, "isa"_a, "seconds"_a);
  nb::class_<Program> program(m, "Program");
  program
      .def("__init__",
           [](Program* self, const std::string& isa, const std::string& act, int threads, int page_size, int num_pages,
              std::vector<std::pair<int, int>> kv_layers, int64_t max_tokens, int64_t block_rows, bool kv_int8,
              std::vector<std::pair<int, int>> kv_places) {
             ProgramSpec spec{named(act, kActs),    page_size,  num_pages,  std::move(kv_layers),
                              std::move(kv_places), max_tokens, block_rows, kv_int8};
             new (self) Program(isa, threads, std::move(spec));
           },
           nb::kw_only(), "isa"_a, "act"_a, "threads"_a, "page_size"_a, "num_pages"_a, "kv_layers"_a, "max_tokens"_a, "block_rows"_a,
           "kv_int8"_a = false, "kv_places"_a = std::vector<std::pair<int, int>>{})
      .def("add_weight", &add_weight, "sources"_a, nb::kw_only(), "swiglu"_a, "format"_a = "act")
      .def("add_vector", &add_vector, "data"_a)
      .def("add_rope_table", &add_rope_table, "cos"_a, "sin"_a, nb::kw_only(), "pairs"_a)
      .def("finish", &Program::finish, nb::kw_only(), "arena_bytes"_a, "logits"_a, "vocab"_a, "max_position"_a)
      .def("run", &run, "inputs"_a, "outputs"_a, "logits"_a.none(), "await_masks"_a = nb::none())
      .def("read_pages", &read_pages, "pages"_a, "out"_a)
      .def("write_pages", &write_pages, "pages"_a, "data"_a)
      .def_prop_ro("page_bytes", &Program::page_bytes)
      .def_prop_ro("isa", [](const Program& p) { return std::string(p.isa()); })
      .def_prop_ro("threads", &Program::threads)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("kv_bytes", &Program::kv_bytes)
      .def_prop_ro("kv_committed_bytes", &Program::kv_committed_bytes)
      .def_prop_ro("arena_bytes", &Program::arena_bytes);
  bind_instructions(program);
}
