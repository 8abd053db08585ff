// Memory of a test as what may be page-locked.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "core/lockable.h"

namespace dynswap::test {

/// All of it is one source, whose owner holds the bytes. They lie on pages of their own.
inline Lockable lockable_memory(HeldBytes::Context& context, const std::byte* data, std::size_t bytes) {
  auto source = std::make_shared<Source>();
  source->name = "master";
  source->address = data;
  source->count = bytes;
  Lockable item;
  item.held = HeldBytes::hold(context);
  source->owner = item.held;
  item.source = std::move(source);
  item.block = data;
  item.block_bytes = bytes;
  item.own_pages = true;
  return item;
}

}  // namespace dynswap::test
