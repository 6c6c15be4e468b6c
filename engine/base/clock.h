/* clock.h: the one clock. Monotonic nanoseconds; only the outer rooms read it and hand `now_ns` down. Any thread. */
#ifndef QUIRE_BASE_CLOCK_H
#define QUIRE_BASE_CLOCK_H

#include <stdint.h>

#define NS_PER_SECOND ((int64_t)1000000000)
#define NS_PER_MS     ((int64_t)1000000)

int64_t clock_now_ns(void); /* monotonic */
int64_t clock_unix_s(void); /* wall clock, for `created` fields only */

#endif
