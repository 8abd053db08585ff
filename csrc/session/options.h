// What a session is given of the front end's options. Each is read here, once.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/engine.h"
#include "core/source.h"
#include "mesh/gathered_copies.h"
#include "tensor/process_group.h"

namespace dynswap {

/// The fields of `Options` in dynswap_ext/config.py, which says what each is for.
struct SessionOptions {
  explicit SessionOptions(const py::handle& given)
      : device(given.attr("device").cast<at::Device>()),
        dtype(given.attr("dtype").cast<std::optional<at::ScalarType>>()),
        page_locks(given.attr("host_budget").attr("page_locks").cast<bool>()),
        keep(given.attr("host_budget").attr("caches").cast<bool>() ? Keep::yes : Keep::no) {
    engine.prefetch = given.attr("prefetch").cast<std::uint32_t>();
    engine.strict_budget = given.attr("strict_budget").cast<bool>();
    if (const py::object folder = given.attr("activations_folder"); !folder.is_none())
      activations_folder = folder.cast<std::string>();
    if (const py::object mesh = given.attr("mesh"); !mesh.is_none()) {
      const py::object groups = mesh.attr("open")(given.attr("device"));
      const RanksOfGroup group{groups.attr("for_device").cast<c10::intrusive_ptr<c10d::Backend>>(),
                               groups.attr("for_host").cast<c10::intrusive_ptr<c10d::Backend>>(),
                               groups.attr("store").cast<c10::intrusive_ptr<c10d::Store>>(),
                               groups.attr("numbers").cast<std::vector<std::size_t>>()};
      ranks = std::make_shared<GatheredCopies>(ranks_of(group, device), place_on_host,
                                               groups.attr("always").cast<bool>());
      close_groups = groups.attr("close");
    }
  }

  at::Device device;
  std::optional<at::ScalarType> dtype;
  bool page_locks;
  Keep keep;
  std::shared_ptr<GatheredCopies> ranks;  ///< null: this process copies for itself alone
  py::object close_groups;                ///< to be called after GatheredCopies::close()
  std::string activations_folder;         ///< if some go to a file
  EngineOptions engine;                   ///< without what a plan adds: its budget, and groups that are known
};

/// `Budget` in dynswap_ext/config.py: what one plan may take. The front end keeps the one that holds now.
struct Budget {
  explicit Budget(const py::handle& given)
      : bytes(given.attr("bytes").cast<std::optional<std::size_t>>()),
        activations(given.attr("activations").cast<std::optional<std::size_t>>()),
        automatic(given.attr("automatic").cast<bool>()) {}

  std::optional<std::size_t> bytes;        ///< none: only what `prefetch` needs
  std::optional<std::size_t> activations;  ///< for what autograd saves; none: all of it stays
  bool automatic;                          ///< its residents give way (Note [Residents give way])
};

}  // namespace dynswap
