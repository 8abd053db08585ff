// At the end of a thread, GCC for MinGW frees the memory of thread_local objects before it destroys them,
// unless the list of their destructors has been used before the first such object. (MSVC has no such order.)
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) noexcept;

namespace {

[[maybe_unused]] const int first = __cxa_thread_atexit([](void*) {}, nullptr, nullptr);

}  // namespace
