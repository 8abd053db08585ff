// Tensors that are handed out of masters, without an interpreter and without an engine.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "tensor/fetch_backward.h"
#include "tensor/handed_out.h"
#include "tensor/master_record.h"
#include "tensor/server.h"
#include "tensor/written_buffers.h"

namespace dynswap::test {

namespace {

/// Keeps what it hears.
class Listener final : public Server {
 public:
  void note_lost(const std::shared_ptr<MasterRecord>& of) override { lost = of->name; }
  void write_back_latest(const c10::intrusive_ptr<c10::StorageImpl>& handed_out) override {
    HandedOut::of(*handed_out)->write_back();
    ++written_back;
  }
  bool give_data(HandedOut& record, const at::Tensor&, const at::Tensor& data,
                 const std::function<void()>& assign) override {
    if (!has_master) return false;
    record.note_other_data();
    given = data;
    assign();
    return true;
  }

  std::string lost;
  int written_back = 0;
  bool has_master = true;
  at::Tensor given;
};

/// A master, and what is handed out of it.
struct Master {
  explicit Master(at::Tensor tensor, at::ScalarType wanted = at::kFloat) : tensor(std::move(tensor)) {
    record->name = "layer.weight";
    record->wanted = wanted;
    record->follow(this->tensor, /*from_file=*/false, Sharing::Place::of(this->tensor));
    record->watch_master(watch_of(this->tensor, /*mapped=*/false));
  }

  at::Tensor hand_out() {
    at::Tensor made = HandedOut::make_private({server, record}, tensor, at::kCPU);
    record->remember(made);
    return made;
  }

  at::Tensor tensor;
  std::shared_ptr<Listener> server = std::make_shared<Listener>();
  std::shared_ptr<MasterRecord> record = std::make_shared<MasterRecord>();
};

/// Writes without a version: as NumPy does, or F.batch_norm its statistics.
void write_silently(const at::Tensor& tensor, float value) { *tensor.mutable_data_ptr<float>() = value; }

TEST(what_is_written_reaches_the_master_when_the_tensor_dies) {
  Master master(at::zeros({4}));
  const auto version = master.tensor._version();
  {
    const at::Tensor handed_out = master.hand_out();
    EXPECT(handed_out.data_ptr() != master.tensor.data_ptr());
    handed_out.add_(2);
    EXPECT(master.tensor.equal(at::zeros({4})));
  }
  EXPECT(master.tensor.equal(at::ones({4}).mul(2)));
  EXPECT_EQ(master.tensor._version(), version + 1);
}

TEST(a_view_keeps_the_way_back) {
  Master master(at::zeros({4}));
  at::Tensor view = master.hand_out().slice(0, 1, 3);
  EXPECT(!master.record->drop_if_dead());
  view.fill_(7);
  view = at::Tensor();
  EXPECT_EQ(master.tensor.sum().item<float>(), 14);
  EXPECT(master.record->drop_if_dead());
}

TEST(what_was_not_written_keeps_the_masters_precision) {
  Master master(at::arange(4, at::kDouble).add(1e-9), at::kFloat);
  {
    const at::Tensor handed_out = master.hand_out();
    EXPECT(handed_out.scalar_type() == at::kFloat);
    handed_out[0] = 5;
  }
  EXPECT_EQ(master.tensor[0].item<double>(), 5);
  EXPECT_EQ(master.tensor[3].item<double>(), 3 + 1e-9);
}

TEST(a_master_that_was_written_meanwhile_wins_and_the_server_hears_of_it) {
  Master master(at::zeros({4}));
  {
    const at::Tensor handed_out = master.hand_out();
    handed_out.fill_(1);
    master.tensor.fill_(3);
    EXPECT(!master.record->still_handed_out());
  }
  EXPECT_EQ(master.tensor.sum().item<float>(), 12);
  EXPECT_EQ(master.server->lost, "layer.weight");
}

TEST(a_tensor_that_outlives_its_server_still_writes_back) {
  Master master(at::zeros({4}));
  {
    const at::Tensor handed_out = master.hand_out();
    handed_out.fill_(1);
    master.server.reset();
    write_back_living(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(handed_out.storage().unsafeGetStorageImpl()));
    EXPECT_EQ(master.tensor.sum().item<float>(), 4);
  }
}

TEST(data_goes_to_whoever_has_the_master) {
  Master master(at::zeros({4}));
  const at::Tensor handed_out = master.hand_out();
  handed_out.set_data(at::ones({4}));
  EXPECT(master.server->given.defined());
  EXPECT_EQ(handed_out.sum().item<float>(), 4);
}

TEST(data_that_nobody_would_get_is_refused) {
  Master master(at::zeros({4}));
  const at::Tensor handed_out = master.hand_out();
  master.server->has_master = false;
  EXPECT_THROWS(handed_out.set_data(at::ones({4})), std::runtime_error);
  EXPECT_EQ(handed_out.sum().item<float>(), 0);
  master.server.reset();
  EXPECT_THROWS(handed_out.set_data(at::ones({4})), std::runtime_error);
}

TEST(masters_that_overlap_are_put_together_by_element) {
  const at::Tensor whole = at::zeros({6});
  Master left(whole.slice(0, 0, 4)), right(whole.slice(0, 2, 6));
  EXPECT(left.record->overlaps() && right.record->overlaps());
  {
    const at::Tensor first = left.hand_out(), second = right.hand_out();
    first[0] = 1;
    first[3] = 2;
    second[3] = 3;
  }
  EXPECT_EQ(whole[0].item<float>(), 1);
  EXPECT_EQ(whole[3].item<float>(), 2);
  EXPECT_EQ(whole[5].item<float>(), 3);
  EXPECT_EQ(whole.sum().item<float>(), 6);
}

TEST(a_write_back_to_a_neighbour_is_not_taken_for_a_write_to_the_master) {
  const at::Tensor whole = at::zeros({8});
  Master left(whole.slice(0, 0, 4)), right(whole.slice(0, 4, 8));
  EXPECT(!left.record->overlaps());
  const at::Tensor kept = left.hand_out();
  const auto version = whole._version();  // one counter for both
  right.hand_out().fill_(1);
  EXPECT_EQ(whole._version(), version + 1);
  EXPECT(left.record->still_handed_out());
}

TEST(statistics_are_written_back_when_the_call_ends) {
  Master master(at::zeros({4}));
  {
    const InsideAnyCall call;
    const at::Tensor statistics = master.hand_out();
    write_back_after_call(statistics);
    write_silently(statistics, 9);
    EXPECT(inside_call());
    std::thread([] { EXPECT(!inside_call()); }).join();
    EXPECT_EQ(master.tensor[0].item<float>(), 0);
    write_back_buffers();
    EXPECT_EQ(master.tensor[0].item<float>(), 9);
    EXPECT_EQ(master.server->written_back, 1);
  }
  EXPECT(!inside_call());
}

TEST(uses_of_a_weight_share_a_node) {
  namespace autograd = torch::autograd;
  Master master(at::ones({2}).set_requires_grad(true));
  GradientNodes nodes;
  const GradientTarget to = gradient_target_of(master.tensor);
  const at::Tensor first = master.hand_out(), second = master.hand_out();
  connect_to_master(first, master.tensor, to, master.record->watch, nodes);
  connect_to_master(second, master.tensor, to, master.record->watch, nodes);
  const auto shared = autograd::impl::gradient_edge(first).function->next_edge(0).function;
  EXPECT(shared != nullptr);
  EXPECT(shared == autograd::impl::gradient_edge(second).function->next_edge(0).function);
  first.mul(2).add(second.mul(3)).sum().backward();
  EXPECT(master.tensor.grad().equal(at::ones({2}).mul(5)));
}

}  // namespace

}  // namespace dynswap::test
