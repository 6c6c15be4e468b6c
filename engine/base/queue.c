#include "engine/base/queue.h"

#include <errno.h>
#include <time.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"

void queue_init(struct queue *queue) {
    pthread_condattr_t attr;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->filled, &attr);
    pthread_condattr_destroy(&attr);
    queue->first = NULL;
    queue->last = &queue->first;
    queue->sleeping = false;
}

void queue_deinit(struct queue *queue) {
    CHECK(!queue->first);
    pthread_cond_destroy(&queue->filled);
    pthread_mutex_destroy(&queue->mutex);
}

void queue_push(struct queue *queue, struct queue_node *node) {
    node->next = NULL;
    pthread_mutex_lock(&queue->mutex);
    *queue->last = node;
    queue->last = &node->next;
    bool wake = queue->sleeping;
    pthread_mutex_unlock(&queue->mutex);
    if (wake) pthread_cond_signal(&queue->filled);
}

static struct queue_node *take_locked(struct queue *queue) {
    struct queue_node *first = queue->first;
    queue->first = NULL;
    queue->last = &queue->first;
    return first;
}

struct queue_node *queue_take_all(struct queue *queue) {
    pthread_mutex_lock(&queue->mutex);
    struct queue_node *first = take_locked(queue);
    pthread_mutex_unlock(&queue->mutex);
    return first;
}

struct queue_node *queue_wait_all(struct queue *queue, int64_t deadline_ns) {
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / NS_PER_SECOND),
                             .tv_nsec = (long)(deadline_ns % NS_PER_SECOND)};
    pthread_mutex_lock(&queue->mutex);
    queue->sleeping = true;
    while (!queue->first) {
        if (deadline_ns == INT64_MAX)
            pthread_cond_wait(&queue->filled, &queue->mutex);
        else if (pthread_cond_timedwait(&queue->filled, &queue->mutex, &until) == ETIMEDOUT)
            break;
    }
    queue->sleeping = false;
    struct queue_node *first = take_locked(queue);
    pthread_mutex_unlock(&queue->mutex);
    return first;
}
