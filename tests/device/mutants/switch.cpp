// The switch of the extension's twin that is built with DYNSWAP_MUTANTS: which protection is taken away.
#include <cstring>

#include "core/protection.h"
#include "cpp/protection_names.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// The i-th protection, null past the last. The first is none.
EXPORTED const char* dynswap_protection(int i) {
  if (i < 0 || i >= static_cast<int>(dynswap::Protection::count)) return nullptr;
  return dynswap::test::name_of(static_cast<dynswap::Protection>(i));
}

/// Takes it away, and puts back the one before. False if there is none of that name.
EXPORTED bool dynswap_without(const char* name) {
  for (int i = 0; const char* known = dynswap_protection(i); ++i) {
    if (std::strcmp(known, name) != 0) continue;
    dynswap::removed_protection = static_cast<dynswap::Protection>(i);
    return true;
  }
  return false;
}
