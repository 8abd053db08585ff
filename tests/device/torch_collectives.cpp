// A backend of torch.distributed for tensors on the device: it stands for NCCL.
//
// A collective is work on a stream of the backend's own, which begins after what the caller's stream holds,
// and in which the device waits for the other ranks. The bytes travel through a backend for tensors in RAM.
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>

#include "torch_device.h"
#include "torch_fallback.h"

namespace pretend {

namespace {

struct Collective final : c10d::Work {
  Collective(int rank, c10d::OpType kind, std::vector<at::Tensor> result, PointPtr end)
      : c10d::Work(rank, kind), result_(std::move(result)), end_(std::move(end)) {}
  bool isCompleted() override { return reached(end_); }
  bool isSuccess() const override { return reached(end_); }
  std::vector<at::Tensor> result() override { return result_; }
  /// The caller's stream waits, and the host does not.
  bool wait(std::chrono::milliseconds) override {
    checked([&] { pretend::wait(current_stream(result_.front().get_device()), end_); });
    return true;
  }
  void synchronize() override { static_cast<void>(wait({})); }

 private:
  const std::vector<at::Tensor> result_;
  const PointPtr end_;
};

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> through)
      : c10d::Backend(through->getRank(), through->getSize()), through_(std::move(through)) {}
  const std::string getBackendName() const override { return "pretend"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return through_->getBackendOptions(); }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& all, at::Tensor& own,
                                                 const c10d::AllgatherOptions&) override {
    const auto work = [through = through_, to = host_view(all), from = host_view(own)] {
      const BareKernels guard;
      at::Tensor part = from.clone(), parts = at::empty(to.sizes(), to.options());
      through->_allgather_base(parts, part)->wait();
      to.copy_(parts);
    };
    const PointPtr end = checked([&] {
      Stream& stream = stream_on(all.get_device());
      pretend::wait(stream, record(current_stream(all.get_device())));
      enqueue(stream, work, "an all-gather");
      return record(stream);
    });
    return c10::make_intrusive<Collective>(getRank(), c10d::OpType::_ALLGATHER_BASE, std::vector{all}, end);
  }

 private:
  Stream& stream_on(int device) {
    Stream*& stream = streams_[device];
    if (stream == nullptr) stream = &make_stream(device, 0);
    return *stream;
  }

  const c10::intrusive_ptr<c10d::Backend> through_;
  Stream* streams_[kDevices]{};
};

}  // namespace

void add_collectives(pybind11::module_& m);
void add_collectives(pybind11::module_& m) {
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> through) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(
        c10::make_intrusive<Collectives>(std::move(through)));
  });
}

}  // namespace pretend
