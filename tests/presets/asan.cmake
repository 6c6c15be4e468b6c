# cmake -C tests/presets/asan.cmake -S . -B build-asan: address and undefined-behaviour sanitizers.
set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "")
set(QUIRE_SANITIZE address CACHE STRING "")
set(QUIRE_CUDA OFF CACHE STRING "")
