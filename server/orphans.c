#include "server/orphans.h"

#include <sys/wait.h>
#include <unistd.h>

/* A dead child, which stays one; 0: there is none. */
static pid_t dead_child(void) {
    siginfo_t info = {0};
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 ? info.si_pid : 0;
}

/* Own children are waited for within milliseconds of their death, so a zombie that was there a second ago as well is
 * nobody's. One a second is more than a health check leaves. */
void orphans_reap(struct orphans *orphans) {
    if (getpid() != 1) return;
    pid_t dead = dead_child();
    if (dead && dead == orphans->dead) {
        waitpid(dead, NULL, WNOHANG);
        dead = dead_child();
    }
    orphans->dead = dead;
}
