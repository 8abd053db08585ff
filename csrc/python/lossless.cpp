#include "python/lossless.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <cstddef>
#include <optional>
#include <string>

#include "accelerator/scalars.h"
#include "core/check.h"
#include "lossless/tensor.h"

namespace dynswap::lossless {
namespace {

Scalar coded_type(at::ScalarType dtype) {
  const std::optional<Scalar> type = scalar_of(dtype);
  if (type && codable(*type)) return *type;
  throw py::value_error(std::string("there is no lossless code for ") + c10::toString(dtype) +
                        ": it is for bfloat16, float16 and float32");
}

const std::byte* data_of(const at::Tensor& tensor, const char* name) {
  if (tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous()) {
    return static_cast<const std::byte*>(tensor.const_data_ptr());
  }
  throw py::value_error(std::string(name) + " has to be a contiguous tensor on the CPU");
}

const std::byte* bytes_of(const at::Tensor& coded) {
  if (coded.scalar_type() != at::kByte) throw py::value_error("a coded tensor is one of uint8");
  return data_of(coded, "coded");
}

std::size_t size_of(std::int64_t count, const char* name) {
  if (count < 0)
    throw py::value_error(std::string(name) + " is a number of weights, not " + std::to_string(count));
  return static_cast<std::size_t>(count);
}

std::optional<at::Tensor> encode(const at::Tensor& tensor) {
  const Scalar type = coded_type(tensor.scalar_type());
  const std::byte* const src = data_of(tensor, "tensor");
  const py::gil_scoped_release release;
  const Encoder encoder(type, src, static_cast<std::size_t>(tensor.numel()), at::get_num_threads());
  if (!encoder.pays()) return std::nullopt;
  at::Tensor coded = at::empty({static_cast<std::int64_t>(encoder.bytes())}, at::TensorOptions(at::kByte));
  encoder.write(static_cast<std::byte*>(coded.mutable_data_ptr()));
  return coded;
}

at::Tensor decode(const at::Tensor& coded, at::ScalarType dtype, std::int64_t count, std::int64_t first,
                  const std::optional<at::Tensor>& out) {
  const Scalar type = coded_type(dtype);
  const std::byte* const src = bytes_of(coded);
  const std::size_t weights = size_of(count, "count");
  const std::size_t begin = size_of(first, "first");
  if (out && out->scalar_type() != dtype) throw py::value_error("out has another dtype than the weights");
  if (out) data_of(*out, "out");
  const std::size_t wanted = out ? static_cast<std::size_t>(out->numel()) : weights - begin;
  if (begin > weights || wanted > weights - begin) {
    throw py::value_error("of " + std::to_string(weights) + " weights there are none from " +
                          std::to_string(begin) + " to " + std::to_string(begin + wanted));
  }
  const py::gil_scoped_release release;
  at::Tensor weights_of =
      out ? out->view(-1) : at::empty({static_cast<std::int64_t>(wanted)}, at::TensorOptions(dtype));
  const auto bytes = static_cast<std::size_t>(coded.numel());
  if (!decode_tensor(type, src, bytes, weights, begin, wanted, weights_of.mutable_data_ptr())) {
    const std::string wrong = check_tensor(type, src, bytes, weights);
    throw SourceError("a coded tensor is damaged: " +
                      (wrong.empty() ? "codes without their escapes" : wrong));
  }
  return weights_of;
}

std::string check(const at::Tensor& coded, at::ScalarType dtype, std::int64_t count) {
  const Scalar type = coded_type(dtype);
  const std::byte* const src = bytes_of(coded);
  const std::size_t weights = size_of(count, "count");
  const py::gil_scoped_release release;
  return check_tensor(type, src, static_cast<std::size_t>(coded.numel()), weights);
}

}  // namespace
}  // namespace dynswap::lossless

namespace dynswap {

void define_lossless(py::module_& m) {
  m.def("lossless_encode", &lossless::encode, py::arg("tensor"),
        "Codes a contiguous CPU tensor of bfloat16, float16 or float32 without loss, as a tensor of uint8, "
        "with "
        "as many threads as torch uses; None if that saves less than a twentieth of its bytes.");
  m.def("lossless_decode", &lossless::decode, py::arg("coded"), py::arg("dtype"), py::arg("count"),
        py::arg("first") = 0, py::arg("out") = py::none(),
        "Decodes weights of a tensor that has `count` in all, from the `first` on: as many as `out` takes, "
        "else all "
        "that follow, as a tensor of one dimension. SourceError if what they are decoded from is damaged.");
  m.def(
      "lossless_check", &lossless::check, py::arg("coded"), py::arg("dtype"), py::arg("count"),
      "What is wrong with the index of a coded tensor of `count` weights, or with the header or directory of "
      "one of its blocks; empty if nothing is.");
}

}  // namespace dynswap
