#include "bindings/weight_table.h"

#include <unordered_set>
#include <utility>

#include "bindings/attribute.h"
#include "bindings/glue.h"

namespace dynswap {

WeightTable::WeightTable(const Settings& settings, const Hooks& hooks)
    : settings_(settings), hooks_(hooks), page_cache_(settings.page_cache) {}

Weight* WeightTable::find(const c10::TensorImpl* master) const noexcept {
  const auto found = by_master_.find(master);
  return found != by_master_.end() && found->second->state.impl == master ? found->second : nullptr;
}

/// What a master is to its session.
struct WeightTable::Kind {
  Weight::AccessPath path = Weight::AccessPath::converted;
  at::ScalarType wanted = at::kFloat;
  bool has_subclass = false;
  std::vector<std::pair<py::object, std::shared_ptr<Weight>>> parts{};
  SourcePtr source{};  ///< if it streams
};

WeightTable::Kind WeightTable::kind_of(const Weight& weight, PyObject* master_object,
                                       const Mappings& mappings) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  Kind kind{.wanted = weight.never_cast ? master.scalar_type() : wanted_type(master, settings_.dtype)};
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
    const py::object names = hooks_.inner_names(py::handle(master_object));
    if (!names.is_none()) {
      kind.path = Weight::AccessPath::wrapped;
      for (const py::handle inner : names) {
        const auto name = py::reinterpret_borrow<py::object>(inner);
        const py::object tensor = py::handle(master_object).attr(name);
        Weight& part = weight_of(tensor.ptr(), weight.name + "." + py::cast<std::string>(name),
                                 /*parameter=*/false, mappings, /*never_cast=*/true);
        kind.parts.emplace_back(name, part.shared_from_this());
      }
      return kind;
    }
    streams = hooks_.adds_attributes_only(py::handle(master_object)).cast<bool>();
  }
  if (streams && streamable(master) && can_move(master.scalar_type(), kind.wanted) &&
      (!in_place || mappings.find(master.const_data_ptr(), master.nbytes()))) {
    const auto source = source_of(master, kind.wanted, weight.name, mappings, page_cache_, *memory_);
    if (!in_place || source->file) {
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
    kind.has_subclass = !plain;
  }
  return kind;
}

void WeightTable::classify(Weight& weight, PyObject* master_object, const Mappings& mappings) {
  // May run Python code, or throw: until then the weight is what it was.
  Kind kind = kind_of(weight, master_object, mappings);
  const c10::TensorImpl& master = *THPVariable_Unpack(master_object).unsafeGetTensorImpl();
  weight.state = MasterState::of(master);
  weight.master_storage.reset();
  if (const c10::Storage& storage = master.unsafe_storage())
    weight.master_storage = storage.getWeakStorageImpl();
  weight.version = master.version_counter();
  weight.mapped = is_mapped(THPVariable_Unpack(master_object), mappings);
  const bool moves_bytes =
      kind.path == Weight::AccessPath::streamed || kind.path == Weight::AccessPath::copied;
  weight.sharing =
      moves_bytes ? Sharing::of(THPVariable_Unpack(master_object), weight.shared_from_this()) : nullptr;
  weight.note_version();
  weight.path = kind.path;
  copies_any_ = copies_any_ || kind.path == Weight::AccessPath::copied;
  weight.wanted = kind.wanted;
  weight.has_subclass = kind.has_subclass;
  for (const auto& [name, part] : weight.parts) --part->holders;
  for (const auto& [name, part] : kind.parts) ++part->holders;
  weight.parts.swap(kind.parts);
  if (kind.source == nullptr) {
    weight.drop_bytes();
    weight.watch_master(kind.path == Weight::AccessPath::copied
                            ? watch_of(THPVariable_Unpack(master_object), weight.mapped)
                            : nullptr);
    return;
  }
  weight.source = kind.source;
  weight.watch_master(std::make_shared<MemoryWatch>(*weight.source));
}

void WeightTable::replace_master(Weight& weight, PyObject* master_object) {
  const at::Tensor& master = THPVariable_Unpack(master_object);
  sweep();
  by_master_[master.unsafeGetTensorImpl()] = &weight;
  classify(weight, master_object, mappings_of(master));
}

Weight& WeightTable::weight_of(PyObject* master, const std::string& name, bool parameter,
                               const Mappings& mappings, bool never_cast) {
  const c10::TensorImpl& impl = *THPVariable_Unpack(master).unsafeGetTensorImpl();
  const auto known = by_master_.find(&impl);
  if (known != by_master_.end() && known->second->state.is_of(impl)) return *known->second;
  Weight& weight = *weights_.emplace_back(std::make_shared<Weight>());
  by_master_[&impl] = &weight;  // before the inner tensors' entries, which may move it
  weight.name = name;
  weight.parameter = parameter;
  weight.never_cast = never_cast;
  classify(weight, master, mappings);
  return weight;
}

/// What came for a while goes with its master.
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

void WeightTable::find_weights(PyObject* module_dict, const std::string& prefix, Unit unit,
                               const Mappings& mappings, std::vector<Entry>& entries, Streamed& streamed) {
  for (Entry& entry : entries) {
    entry.bind(nullptr);
    PyObject* const master = find_in(
        module_dict, entry.parameter ? Names::get().parameters : Names::get().buffers, entry.name.ptr());
    if (master == nullptr || !THPVariable_Check(master)) continue;
    const std::size_t known = weights_.size();  // a wrapper brings its inner tensors along
    const std::string name = prefix + py::cast<std::string>(entry.name);
    entry.bind(weight_of(master, name, entry.parameter, mappings).shared_from_this());
    for (std::size_t i = known; i < weights_.size(); ++i) {
      Weight* const weight = weights_[i].get();
      if (weight->path == Weight::AccessPath::streamed) streamed.emplace_back(weight, unit);
    }
  }
}

std::string WeightTable::pin(const std::string& backend, const std::vector<Weight*>& weights) {
  if (settings_.device.is_cpu() || !settings_.pin) return {};
  const std::shared_ptr<MasterMemory> memory = memory_;
  std::vector<SourcePtr> before;
  for (const Weight* weight : weights) before.push_back(weight->source);
  std::vector<SourcePtr> sources = before;
  const std::string slower = memory->pin(settings_.device, backend, settings_.pin, sources);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    // Other threads could run: the master may be another by now.
    if (weights[i]->source != before[i]) continue;
    weights[i]->source = std::move(sources[i]);
    const Source& source = *weights[i]->source;
    if (source.pinned && !source.pinned_copy && weights[i]->watch) weights[i]->watch->note_pinned();
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
    weight->watch = nullptr;  // what was handed out has its own share, and the master's memory too
  }
  memory_->end();
}

}  // namespace dynswap
