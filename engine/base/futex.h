/* futex.h: sleeping on a 32-bit word until somebody changes it. Any thread; threads of one process only. */
#ifndef QUIRE_BASE_FUTEX_H
#define QUIRE_BASE_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Returns when the word no longer holds `seen`, when woken, when interrupted, or after timeout_ns: look again. */
static inline void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns) {
    const struct timespec time = {.tv_sec = (time_t)(timeout_ns / 1000000000), .tv_nsec = timeout_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &time, NULL, 0);
}

static inline void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

#endif
