/* sim.c: the whole simulator as one source, for programs that are built from one file. */
#include "tests/sim/random.c"
#include "tests/sim/device.c"
#include "tests/sim/clients.c"
#include "tests/sim/told.c"
#include "tests/sim/world.c"
