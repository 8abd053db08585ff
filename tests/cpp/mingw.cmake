# Compiles for Windows with MinGW-w64, and runs the tests under Wine.
set(CMAKE_SYSTEM_NAME Windows)
find_program(CMAKE_CXX_COMPILER NAMES x86_64-w64-mingw32-g++-posix x86_64-w64-mingw32-g++ REQUIRED)
find_program(CMAKE_CROSSCOMPILING_EMULATOR NAMES wine wine64)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)  # Wine has no libstdc++
