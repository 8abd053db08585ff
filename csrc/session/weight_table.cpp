#include "session/weight_table.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "accelerator/plain_torch.h"
#include "accelerator/scalars.h"
#include "accelerator/torch_stream.h"
#include "session/module_state.h"
#include "session/python_content.h"

namespace dynswap {

namespace {

/// Whether a name is in a frozenset, or in None.
bool contains(const py::object& names, const py::object& name) {
  if (!names) return false;
  const int found = PySet_Contains(names.ptr(), name.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

}  // namespace

WeightTable::WeightTable(const Settings& settings, const Hooks& hooks) : settings_(settings), hooks_(hooks) {}

Weight* WeightTable::find(const c10::TensorImpl* master) const noexcept {
  const auto found = by_master_.find(master);
  return found != by_master_.end() && found->second->state.impl == master ? found->second : nullptr;
}

void WeightTable::expect(std::size_t masters) {
  weights_.reserve(weights_.size() + masters);
  by_master_.reserve(by_master_.size() + masters);
  memory_->expect(masters);
}

namespace {

py::object view_of_slice(PyObject* master_object, std::int64_t i) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  if (!has_own_bytes(master)) {  // coded
    return py::handle(master_object).attr("detach")().attr("select")(0, i);
  }
  at::Tensor view = alias_of(master);
  view.unsafeGetTensorImpl()->set_storage_offset(master.storage_offset() + i * master.stride(0));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(master.sizes().slice(1), master.strides().slice(1));
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(view));
  if (!object) throw py::error_already_set();
  return object;
}

}  // namespace

namespace {

/// Whether a content has bytes to copy from: not those of a compiler's stand-in.
bool plain_bytes(const at::Tensor& held) {
  return !held.key_set().has_any(c10::python_ks | c10::functorch_transforms_ks) && streamable(held);
}

}  // namespace

/// What a master is to its session.
struct WeightTable::Kind {
  Weight::AccessPath path = Weight::AccessPath::converted;
  at::ScalarType wanted = at::kFloat;
  bool has_subclass = false;
  std::vector<std::pair<py::object, std::shared_ptr<Weight>>> parts{};
  SourcePtr source{};    ///< if it streams
  at::Tensor watched{};  ///< what has the bytes, if torch copies them
  std::shared_ptr<MasterContent> content{};
};

WeightTable::Kind WeightTable::kind_of(const Weight& weight, PyObject* master_object,
                                       const Mappings& mappings, std::int64_t slices) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  Kind kind{.wanted = wanted_type(master, settings_.dtype, weight.casting)};
  const bool plain = THPVariable_CheckExact(master_object);
  const bool lazy = !plain && PyObject_HasAttrString(master_object, "materialize") == 1;
  // There is nothing to move yet, or not any more (offloading gives a module masters without data between its
  // calls). An empty buffer may be about to be resized in place, as observers do.
  if (lazy || !has_memory(master) || (!weight.parameter && master.sym_numel() == 0)) {
    kind.path = Weight::AccessPath::as_is;
    return kind;
  }
  const bool in_place = master.device() == settings_.device && master.scalar_type() == kind.wanted;
  bool streams = plain;
  if (!plain) {
    const py::object apart = hooks_.inner_names_or_streams(py::handle(master_object), in_place);
    if (py::isinstance<py::tuple>(apart)) {
      const HeldContent held{py::reinterpret_borrow<py::tuple>(apart)};
      if (!held.first && in_place) {
        kind.path = Weight::AccessPath::as_is;
        return kind;
      }
      if (master.sym_numel() == 0) return kind;
      if (!plain_bytes(held.bytes)) {
        if (held.first || !copyable(held.bytes) || !scalar_of(kind.wanted)) return kind;
        kind.path = Weight::AccessPath::copied;
        kind.content = std::make_shared<PythonContent>(held, master);
        kind.watched = held.bytes;
        return kind;
      }
      const SourcePtr source =
          held.first ? coded_source_of(master, held.bytes, *held.first, held.weights, kind.wanted,
                                       weight.name, mappings, settings_.keep, *memory_)
                     : source_of(held.bytes, kind.wanted, weight.name, mappings, settings_.keep, *memory_);
      // Of slices, too: all of it may be read at once.
      kind.content = std::make_shared<PythonContent>(held, master, source.get());
      if (slices > 1 && slice(kind, weight, master_object, mappings, slices)) return kind;
      kind.path = Weight::AccessPath::streamed;
      kind.source = source;
      return kind;
    }
    if (!py::isinstance<py::bool_>(apart)) {
      kind.path = Weight::AccessPath::wrapped;
      for (const py::handle inner : apart) {
        const auto name = py::reinterpret_borrow<py::object>(inner);
        const py::object tensor = py::handle(master_object).attr(name);
        Weight& part = weight_of(tensor.ptr(), weight.name + "." + py::cast<std::string>(name),
                                 /*parameter=*/false, mappings, Casting::never);
        kind.parts.emplace_back(name, part.shared_from_this());
      }
      const bool nothing_moves = std::all_of(kind.parts.begin(), kind.parts.end(), [](const auto& part) {
        return part.second->path == Weight::AccessPath::as_is;
      });
      if (in_place && nothing_moves) {
        kind.path = Weight::AccessPath::as_is;
        kind.parts.clear();
      }
      return kind;
    }
    streams = apart.cast<bool>();
  }
  if (streams && streamable(master) && can_move(master.scalar_type(), kind.wanted) &&
      (!in_place || mappings.holds_any(master.const_data_ptr(), master.nbytes()))) {
    if (slices > 1 && plain && slice(kind, weight, master_object, mappings, slices)) return kind;
    const auto source = source_of(master, kind.wanted, weight.name, mappings, settings_.keep, *memory_);
    if (!in_place || source->from_files()) {
      kind.path = Weight::AccessPath::streamed;
      kind.has_subclass = !plain;
      kind.source = source;
      return kind;
    }
  }
  if (in_place) {
    kind.path = Weight::AccessPath::as_is;
  } else if (streams && copyable(master) && scalar_of(kind.wanted)) {
    kind.path = Weight::AccessPath::copied;
    kind.watched = master;
    kind.has_subclass = !plain;
  }
  return kind;
}

/// Makes a weight of each slice along the first dimension. False if the master cannot be served so.
bool WeightTable::slice(Kind& kind, const Weight& weight, PyObject* master_object, const Mappings& mappings,
                        std::int64_t slices) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  if (master.dim() < 2 || master.size(0) != slices || !master.is_contiguous()) return false;
  if (settings_.read_whole->contains(master.unsafeGetTensorImpl())) return false;
  for (std::int64_t i = 0; i < slices; ++i) {
    const py::object object = view_of_slice(master_object, i);
    Weight& part = weight_of(object.ptr(), weight.name + "[" + std::to_string(i) + "]",
                             /*parameter=*/false, mappings, weight.casting);
    if (part.path != Weight::AccessPath::streamed) return false;
    part.slice = i;
    kind.parts.emplace_back(object, part.shared_from_this());
  }
  kind.path = Weight::AccessPath::sliced;
  return true;
}

std::shared_ptr<const void> WeightTable::classify(Weight& weight, PyObject* master_object,
                                                  const Mappings& mappings, std::int64_t slices) {
  // May run Python code, or throw: until then the weight is what it was.
  Kind kind = kind_of(weight, master_object, mappings, slices);
  const at::Tensor& master = THPVariable_Unpack(master_object);
  weight.path = kind.path;
  weight.master_storage.reset();
  if (const c10::Storage& storage = master.unsafeGetTensorImpl()->unsafe_storage())
    weight.master_storage = storage.getWeakStorageImpl();
  weight.content.swap(kind.content);
  std::optional<Sharing::Place> place;
  if (weight.moves_bytes()) place = weight.content ? weight.content->place() : Sharing::Place::of(master);
  const bool mapped = !weight.content && (kind.source ? kind.source->mapped : is_mapped(master, mappings));
  weight.follow(master, mapped, std::move(place));
  copies_any_ = copies_any_ || kind.path == Weight::AccessPath::copied;
  weight.wanted = kind.wanted;
  weight.has_subclass = kind.has_subclass;
  for (const auto& [name, part] : weight.parts) --part->holders;
  for (const auto& [name, part] : kind.parts) ++part->holders;
  weight.parts.swap(kind.parts);
  const bool streams = kind.source != nullptr;
  weight.source.swap(kind.source);
  if (streams) {
    // Coded bytes are never written to: a write makes the master plain.
    weight.watch_master(weight.source->coding ? nullptr : std::make_shared<MemoryWatch>(*weight.source));
  } else {
    weight.source = kind.source;
    weight.drop_bytes();
    weight.watch_master(kind.watched.defined() ? watch_of(kind.watched, weight.mapped) : nullptr);
  }
  const bool was_known = kind.source || kind.content || !kind.parts.empty();
  return was_known ? std::make_shared<const Kind>(std::move(kind)) : nullptr;
}

std::shared_ptr<const void> WeightTable::replace_master(Weight& weight, PyObject* master_object) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  sweep();
  by_master_[master.unsafeGetTensorImpl()] = &weight;
  return classify(weight, master_object, MappingsOfMasters().of(master));
}

std::shared_ptr<const void> WeightTable::follow_plain(Weight& weight, MasterContent& content) {
  Kind kind{.content = content.as_plain()};
  const at::Tensor values = kind.content->memory();
  kind.source =
      source_of(values, weight.wanted, weight.name, MappingsOfMasters().of(values), settings_.keep, *memory_);
  weight.content.swap(kind.content);
  weight.source.swap(kind.source);
  weight.watch_master(std::make_shared<MemoryWatch>(*weight.source));
  return std::make_shared<const Kind>(std::move(kind));
}

Weight& WeightTable::weight_of(PyObject* master, const std::string& name, bool parameter,
                               const Mappings& mappings, Casting casting, std::int64_t slices) {
  const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
  const auto known = by_master_.find(&impl);
  if (known != by_master_.end() && known->second->state.is_of(impl)) return *known->second;
  Weight& weight = *weights_.emplace_back(std::make_shared<Weight>());
  by_master_[&impl] = &weight;  // before the inner tensors' entries, which may move it
  weight.name = name;
  weight.parameter = parameter;
  weight.casting = casting;
  classify(weight, master, mappings, slices);
  return weight;
}

/// Weights that came for a while go with their masters.
void WeightTable::sweep() {
  if (weights_.size() < sweep_at_) return;
  std::unordered_set<const Weight*> unused;  // nobody reads it, nothing that was handed out has it
  std::erase_if(weights_, [&](const std::shared_ptr<Weight>& weight) {
    if (weight.use_count() > 1 || weight->plan || !weight->master_storage.expired()) return false;
    for (const auto& [name, part] : weight->parts) --part->holders;
    unused.insert(weight.get());
    return true;
  });
  std::erase_if(by_master_, [&](const auto& entry) { return unused.contains(entry.second); });
  sweep_at_ = weights_.size() + weights_.size() / 8 + 8;
}

namespace {

/// The unit of one of a module's fused experts.
WeightTable::Unit expert_of(const WeightTable::Unit& module, std::int64_t slice) {
  return {.number = module.number + (static_cast<std::uint64_t>(slice + 1) << 32),
          .options = {.model = module.options.model, .by_use = true}};
}

/// Calls `use` for the weight, or for the parts that it is put together from, if they stream.
void for_streamed(Weight& weight, const std::function<void(Weight&)>& use) {
  if (weight.path == Weight::AccessPath::streamed) use(weight);
  if (weight.path != Weight::AccessPath::wrapped) return;
  for (const auto& [name, part] : weight.parts) for_streamed(*part, use);
}

}  // namespace

void WeightTable::find_weights(PyObject* module_dict, const std::string& prefix, const Choice& choice,
                               MappingsOfMasters& mappings, std::vector<Entry>& entries, Streamed& streamed) {
  const std::size_t first = streamed.first.size();
  for (Entry& entry : entries) {
    entry.bind(nullptr);
    entry.ignored = contains(choice.ignore, entry.name);
    if (entry.ignored) continue;
    Unit unit = choice.unit;
    unit.options.keep = contains(choice.keep, entry.name);
    // Held, as Python code that looks at it lets other threads run.
    const auto held = py::reinterpret_borrow<py::object>(master_of(module_dict, entry));
    PyObject* const master = held.ptr();
    if (master == nullptr) continue;
    const std::size_t known =
        weights_.size();  // a wrapper brings its inner tensors along, and slices come too
    const std::string name = prefix + py::cast<std::string>(entry.name);
    // What is kept stays as a whole.
    const std::int64_t slices = entry.parameter && !unit.options.keep ? unit.slices : 0;
    if (unit.options.keep) unit.options.by_use = false;
    Weight& found = weight_of(master, name, entry.parameter, mappings.of(THPVariable_Unpack(master)),
                              entry.casting, slices);
    entry.bind(found.shared_from_this());
    if (known == weights_.size()) {
      for_streamed(found, [&](Weight& weight) { streamed.again.emplace_back(&weight, unit); });
    }
    for (std::size_t i = known; i < weights_.size(); ++i) {
      Weight* const weight = weights_[i].get();
      if (weight->path == Weight::AccessPath::streamed)
        streamed.first.emplace_back(weight, weight->slice < 0 ? unit : expert_of(unit, weight->slice));
    }
  }
  // An expert's slices of all the module's parameters travel together.
  if (choice.unit.slices == 0) return;
  std::stable_sort(streamed.first.begin() + static_cast<std::ptrdiff_t>(first), streamed.first.end(),
                   [](const auto& a, const auto& b) { return a.first->slice < b.first->slice; });
}

std::string WeightTable::pin(const std::string& backend, const std::vector<Weight*>& weights) {
  if (settings_.device.is_cpu() || !settings_.copies) return {};
  const std::shared_ptr<MasterMemory> memory = memory_;
  std::vector<SourcePtr> before;
  for (const Weight* weight : weights) before.push_back(weight->source);
  std::vector<SourcePtr> sources = before;
  std::vector<std::shared_ptr<MemoryWatch>> watches(weights.size());  // see Note [To page-lock is to write]
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i]->watch || memory->pinned(*before[i])) continue;
    watches[i] = weights[i]->watch;
    watches[i]->before_pinning(/*copied=*/weights[i]->plan != nullptr);
  }
  const std::string slower = memory->pin(settings_.device, backend, *settings_.copies, sources);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    // Other threads could run: the master may be another by now.
    if (weights[i]->source != before[i]) continue;
    weights[i]->source = std::move(sources[i]);
    const Source& source = *weights[i]->source;
    // Also of what was locked for a while only, or in part: that wrote to its pages, too.
    if (watches[i]) watches[i]->after_pinning();
    if (!source.pinned || source.pinned_copy) continue;
    if (weights[i]->watch) weights[i]->watch->note_pinned();
  }
  return slower;
}

void WeightTable::for_weights(const std::vector<at::Tensor>& masters,
                              const std::function<void(Weight&)>& use) const {
  const std::function<void(Weight&)> visit = [&](Weight& weight) {
    use(weight);
    for (const auto& [name, part] : weight.parts) visit(*part);
  };
  for (const at::Tensor& master : masters) {
    if (Weight* const weight = find(master.unsafeGetTensorImpl())) visit(*weight);
  }
}

std::size_t WeightTable::sampled_bytes() const {
  std::size_t bytes = 0;
  for (const auto& weight : weights_) {
    if (weight->watch && !weight->watch->exact()) bytes += weight->watch->size();
  }
  return bytes;
}

void WeightTable::drop_bytes() {
  for (const auto& weight : weights_) {
    weight->drop_bytes();
    if (weight->content) weight->content = weight->content->without_bytes();
    if (weight->path == Weight::AccessPath::sliced) weight->parts.clear();  // and their views of the master
    weight->watch = nullptr;  // what was handed out has its own share, and the master's memory too
  }
  memory_->end();
}

}  // namespace dynswap
