/* orphans.h: the duty of process 1 of a container: children of others, left behind by a health check or a shell, become
 * its own and stay zombies until it asks for them. Anywhere but as process 1 this does nothing. Leaves the children
 * that the owner started to whoever waits for them. Loop thread. */
#ifndef QUIRE_SERVER_ORPHANS_H
#define QUIRE_SERVER_ORPHANS_H

#include <sys/types.h>

struct orphans {
    pid_t dead; /* a zombie seen the last time; 0: none */
};

/* Once a second. */
void orphans_reap(struct orphans *orphans);

#endif
