/* queue.h: many senders, one receiver. Nodes are embedded in messages; ownership moves with the node. The receiver
 * takes everything at once and may sleep until something comes. No allocation here. */
#ifndef QUIRE_BASE_QUEUE_H
#define QUIRE_BASE_QUEUE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct queue_node {
    struct queue_node *next;
};

struct queue {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    struct queue_node *first, **last; /* under mutex */
    bool sleeping;                    /* the receiver waits on `filled` */
};

void queue_init(struct queue *queue);
void queue_deinit(struct queue *queue);                        /* must be empty */
void queue_push(struct queue *queue, struct queue_node *node); /* any thread */

/* Takes all nodes in order of arrival, NULL when there is none. Receiver only. */
struct queue_node *queue_take_all(struct queue *queue);

/* As queue_take_all, but sleeps until a node comes or clock_now_ns() reaches deadline_ns (INT64_MAX: for ever). */
struct queue_node *queue_wait_all(struct queue *queue, int64_t deadline_ns);

#endif
