// Session: parameters that are served by their slices. See Note [Slices of a parameter].
#include <algorithm>
#include <utility>
#include <vector>

#include "accelerator/plain_torch.h"
#include "accelerator/torch_stream.h"
#include "core/amount.h"
#include "session/calls.h"
#include "session/session.h"
#include "tensor/autograd_state.h"
#include "tensor/fetch_backward.h"

namespace dynswap {

namespace {

/// Bytes of all of a sliced parameter on the device.
std::size_t whole_bytes(const Weight& weight) {
  if (weight.content && !weight.parts.empty())  // its state has no sizes
    return weight.parts.size() * weight.parts.front().second->source->count * at::elementSize(weight.wanted);
  return static_cast<std::size_t>(c10::multiply_integers(weight.state.sizes)) *
         at::elementSize(weight.wanted);
}

}  // namespace

py::object Session::fetch_slice(const py::object& master_object, std::int64_t index) {
  const at::Tensor& master = THPVariable_Unpack(master_object.ptr());
  torch::autograd::Edge to_master;
  if (master.requires_grad()) to_master = gradient_edge_of(master);
  std::shared_ptr<Weight> whole;
  do {  // others may run, and a plan or the session's end takes the slices away
    Weight* const found = closed_ ? nullptr : table_->find(master.unsafeGetTensorImpl());
    if (found == nullptr) return py::none();
    whole = found->shared_from_this();
    if (!settle(*whole, master_object.ptr()) || !sliced(*whole)) return py::none();
    if (!whole->latest_storage.expired())
      write_back(*whole);  // somebody has had all of it, and may have written
  } while (whole->parts.empty());
  const auto [view_object, part] = whole->parts.at(static_cast<std::size_t>(index));
  auto fetched = py::reinterpret_steal<py::object>(
      access(*part, view_object.ptr(), /*training=*/false, /*inside=*/true));
  const at::Tensor& tensor = THPVariable_Unpack(fetched.ptr());
  if (to_master.is_valid() && !tensor.requires_grad()) {
    const at::Tensor& view = THPVariable_Unpack(view_object.ptr());
    const auto to = gradient_target_of_slice(master, to_master, view, index, whole->stacked);
    connect_to_master(tensor, view, to, part->watch, part->gradient);
  } else if (!master.requires_grad() && tensor.requires_grad()) {  // it has been frozen since
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(alias_of(tensor)));
  }
  return fetched;
}

py::object Session::fetch_whole(const py::object& master_object) {
  const at::Tensor& master = THPVariable_Unpack(master_object.ptr());
  Weight* const found = closed_ ? nullptr : table_->find(master.unsafeGetTensorImpl());
  if (found == nullptr)
    return copied_by_torch(master_object, options_.device,
                           wanted_type(master, options_.dtype, Casting::to_dtype), /*copy=*/false);
  const std::shared_ptr<Weight> whole = found->shared_from_this();
  const bool first =
      sliced(*whole) && inside_call_of(*this) && read_whole_->note(master.unsafeGetTensorImpl());
  if (first) outdated_ = true;  // the next plan has it as a whole
  if (sliced(*whole)) {
    DeferredRelease dropped;
    for (const auto& [view, part] : whole->parts) write_back(*part, dropped);
  }
  const InsideCall compiled(nullptr);
  if (!settle(*whole, master_object.ptr()))
    return py::reinterpret_steal<py::object>(convert(*whole, master_object.ptr()));
  auto fetched = py::reinterpret_steal<py::object>(
      plain_access(*whole, master_object.ptr(), /*training=*/false, /*inside=*/true, {}));
  if (first && plan_->budget.bytes && !std::exchange(said_whole_, true)) {  // last: it may be made an error
    hooks_.warn(
        "an operation reads all experts of " + whole->name + " at once, " + amount(whole_bytes(*whole)) +
        ": in this call they are copied outside the budget (overflow_bytes in the statistics), from " +
        "the next one on they are streamed as a whole, if the budget holds that. To move the chosen " +
        "experts alone, index the parameter by expert or give it to grouped_mm");
  }
  return fetched;
}

std::shared_ptr<void> Session::count_whole(const Weight& weight) {
  if (!sliced(weight)) return nullptr;
  const std::size_t bytes = whole_bytes(weight);
  if (const auto budget = plan_->budget.bytes; options_.engine.strict_budget && budget) {
    throw BudgetError(
        "an operation reads all experts of " + weight.name + " at once, " + amount(bytes) +
            ", for which the plan has no room in the budget of " + amount(*budget) +
            ", and strict_budget=True does not allow more. Call the model again: the next plan "
            "has room, if the budget holds them. Or index the parameter by expert, or give it to grouped_mm",
        *budget + bytes);
  }
  return plan_->engine->count_outside(bytes);
}

/// No plan holds all that was read as a whole: the largest of what is new to it stays sliced. False if there
/// is nothing new.
bool Session::serve_largest_by_slices(const BudgetError& error) {
  std::vector<std::pair<std::size_t, const c10::TensorImpl*>> fresh;
  for (const c10::TensorImpl* const impl : read_whole_->unplanned()) {
    const Weight* const weight = table_->find(impl);
    fresh.emplace_back(weight == nullptr ? 0 : whole_bytes(*weight), impl);
  }
  if (fresh.empty()) return false;
  const std::size_t largest = std::max_element(fresh.begin(), fresh.end())->first;
  bool said = false;
  for (const auto& [bytes, impl] : fresh) {
    if (bytes < largest) continue;
    read_whole_->refuse(impl);
    const Weight* const weight = table_->find(impl);
    if (weight == nullptr || std::exchange(said, true)) continue;
    hooks_.warn("an operation reads all experts of " + weight->name + " at once, and " + error.what() +
                ". So in each call they are copied outside the budget (overflow_bytes in the statistics). " +
                "Give a larger budget, or index the parameter by expert, or give it to grouped_mm");
  }
  return true;
}

/// Slices that a plan streams, all of the same one; none otherwise.
std::pair<std::shared_ptr<const Plan>, std::vector<WeightId>> Session::streamed_slices(
    const py::object& master_object, const std::vector<std::int64_t>& indices) {
  const at::Tensor& master = THPVariable_Unpack(master_object.ptr());
  const Weight* const whole = closed_ || abandoned_ ? nullptr : table_->find(master.unsafeGetTensorImpl());
  if (whole == nullptr || !sliced(*whole) || capturing()) return {};
  std::shared_ptr<const Plan> plan;
  std::vector<WeightId> ids;
  for (const std::int64_t index : indices) {
    if (index < 0 || static_cast<std::size_t>(index) >= whole->parts.size()) return {};
    const Weight& part = *whole->parts[static_cast<std::size_t>(index)].second;
    if (!part.plan || part.path != Weight::AccessPath::streamed) return {};
    if (plan && plan != part.plan) return {};
    plan = part.plan;
    ids.push_back(part.id);
  }
  return {std::move(plan), std::move(ids)};
}

void Session::expect_slices(const py::object& master, const std::vector<std::int64_t>& indices) {
  const auto [plan, ids] = streamed_slices(master, indices);
  if (ids.empty()) return;
  const py::gil_scoped_release release;
  plan->engine->expect(ids);
}

std::uint32_t Session::guess_slices(const py::object& master, const std::vector<std::int64_t>& indices) {
  const auto [plan, ids] = streamed_slices(master, indices);
  if (ids.empty()) return 0;
  const py::gil_scoped_release release;
  return plan->engine->guess(ids);
}

py::object Session::fetch_for_guess(const py::object& master) {
  if (closed_ || abandoned_) return py::none();
  Weight* const found = table_->find(THPVariable_Unpack(master.ptr()).unsafeGetTensorImpl());
  if (found == nullptr) return py::none();
  const std::shared_ptr<Weight> weight = found->shared_from_this();
  const bool streamed = weight->path == Weight::AccessPath::streamed && weight->plan;
  if (streamed ? !weight->plan->engine->has_room(weight->id) : weight->path != Weight::AccessPath::as_is)
    return py::none();
  return py::reinterpret_steal<py::object>(
      access(*weight, master.ptr(), /*training=*/false, /*inside=*/true));
}

}  // namespace dynswap
