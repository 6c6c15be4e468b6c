# cmake -C tests/presets/tsan.cmake -S . -B build-tsan: thread sanitizer.
set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "")
set(QUIRE_SANITIZE thread CACHE STRING "")
set(QUIRE_CUDA OFF CACHE STRING "")
