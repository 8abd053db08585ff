// A small test harness.
//
//   TEST(name) { EXPECT(condition); EXPECT_EQ(a, b); EXPECT_THROWS(expression, Type); }
//
// Tests register themselves; main.cpp runs them. An EXPECT that fails is reported with its place and the
// test goes on; EXPECT may be used from any thread.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace dynswap::test {

struct Test {
  const char* name;
  const char* file;
  std::function<void()> body;
};

/// Every test of the binary, in the order in which they registered.
std::vector<Test>& tests();

/// Records a failure of the test that is running. Thread-safe.
void fail(const char* file, int line, const std::string& message);

struct Registrar {
  Registrar(const char* name, const char* file, void (*body)()) { tests().push_back({name, file, body}); }
};

/// A value as text, where it can be printed.
template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out << value;
  } else if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else {
    out << "<" << sizeof(T) << " bytes>";
  }
  return out.str();
}

template <typename A, typename B>
bool equal(const A& a, const B& b) {
  if constexpr (std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, bool> &&
                !std::is_same_v<B, bool>) {
    return std::cmp_equal(a, b);  // no surprise between signed and unsigned
  } else {
    return a == b;
  }
}

template <typename A, typename B>
void expect_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!equal(a, b)) fail(file, line, std::string(text) + ": " + show(a) + " is not " + show(b));
}

template <typename E, typename F>
void expect_throws(F&& body, const char* text, const char* type, const char* file, int line) {
  try {
    body();
  } catch (const E&) {
    return;
  } catch (const std::exception& other) {
    fail(file, line, std::string(text) + ": threw another exception than " + type + ": " + other.what());
    return;
  }
  fail(file, line, std::string(text) + ": did not throw " + type);
}

}  // namespace dynswap::test

#define TEST(name)                                                                                         \
  static void dynswap_test_##name();                                                                       \
  static const ::dynswap::test::Registrar dynswap_registrar_##name{#name, __FILE__, &dynswap_test_##name}; \
  static void dynswap_test_##name()

#define EXPECT(...)                                                              \
  do {                                                                           \
    if (!(__VA_ARGS__)) ::dynswap::test::fail(__FILE__, __LINE__, #__VA_ARGS__); \
  } while (false)

#define EXPECT_EQ(a, b) ::dynswap::test::expect_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

#define EXPECT_THROWS(expression, type)                                                                      \
  ::dynswap::test::expect_throws<type>([&] { static_cast<void>(expression); }, #expression, #type, __FILE__, \
                                       __LINE__)
