#include "session/calls.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "session/module_state.h"
#include "session/session.h"

namespace dynswap {

namespace {

struct Call {
  const Session* session;  ///< null: none serves the module
  PyObject* module;        ///< borrowed; null: there is none
};

/// The calls that this thread is in, the innermost last.
std::vector<Call>& calls() noexcept {
  thread_local std::vector<Call> of_this_thread;
  return of_this_thread;
}

/// Whether a weight is what `entry` is the weight of, or a part of that.
bool is_of(const Weight& weight, const Entry& entry) {
  if (entry.weight == nullptr) return false;
  const auto& parts = entry.weight->parts;
  return entry.weight.get() == &weight || std::any_of(parts.begin(), parts.end(), [&](const auto& part) {
           return part.second.get() == &weight;
         });
}

}  // namespace

InsideCall::InsideCall(const Session* session, PyObject* module) { calls().push_back({session, module}); }

InsideCall::~InsideCall() { calls().pop_back(); }

InsideOffloading::InsideOffloading(const Session& session) : session_(session) {
  calls().push_back({&session_, nullptr});
}

/// Blocks of a program may end in another order than the reverse: those of generators, of coroutines.
InsideOffloading::~InsideOffloading() {
  const auto own = std::find_if(calls().rbegin(), calls().rend(), [&](const Call& call) {
    return call.session == &session_ && call.module == nullptr;
  });
  if (own != calls().rend()) calls().erase(std::next(own).base());
}

namespace {

template <class Is>
const Session* innermost(const Is& is) noexcept {
  const auto found = std::find_if(calls().rbegin(), calls().rend(), [&](const Call& call) {
    return call.session != nullptr && is(*call.session);
  });
  return found == calls().rend() ? nullptr : found->session;
}

}  // namespace

const Session* innermost_session() noexcept {
  return innermost([](const Session&) { return true; });
}

const Session* innermost_offloading_session(const at::Device& device) noexcept {
  return innermost(
      [&](const Session& session) { return session.offload() != nullptr && session.device() == device; });
}

const Session* calling_session() noexcept { return calls().empty() ? nullptr : calls().back().session; }

bool inside_call_of(const Session& session) noexcept {
  return std::any_of(calls().rbegin(), calls().rend(), [&](const Call& call) {
    return call.session == &session || (call.session != nullptr && call.session->succeeded_by(session));
  });
}

py::object master_held_by_callers(const Weight& weight, const at::Tensor& shown) {
  const std::vector<Call> running = calls();
  for (auto call = running.rbegin(); call != running.rend(); ++call) {
    if (call->module == nullptr) continue;
    for (const Visited& visited : modules_of(call->module)) {
      const ModuleView view(visited.module.ptr());
      if (view.state == nullptr) continue;
      for (const Entry& entry : *view.state->entries) {
        PyObject* const master = is_of(weight, entry) ? view.master(entry) : nullptr;
        if (master == nullptr) continue;
        const at::Tensor& tensor = THPVariable_Unpack(master);
        if (entry.weight->state.impl == tensor.unsafeGetTensorImpl() && tensor.sizes() == shown.sizes())
          return py::reinterpret_borrow<py::object>(master);
      }
    }
  }
  return {};
}

}  // namespace dynswap
