/* http_socket.h: the sockets under http_conn.h: waiting lists, reading, writing at the end of a turn, time-outs. The
 * loop thread owns everything. Private to http_server.c and http_socket.c.
 *
 * Each socket waits in one list of its state, oldest first, so that one coarse timer serves all time-outs; output made
 * in a turn of the loop goes out with one write a connection at its end.
 *
 * Invariants:
 * 1. A socket is in exactly one of the wait lists, the one its connection's state asks for, and in the write list
 * besides while a write is in flight.
 * 2. At most one write request is in flight a socket; its bytes are conn.in_flight.
 * 3. A socket is freed only in its close callback. */
#ifndef QUIRE_SERVER_HTTP_SOCKET_H
#define QUIRE_SERVER_HTTP_SOCKET_H

#include <time.h>

#include "engine/base/log.h"
#include "server/http_conn.h"

#define READ_BYTES ((size_t)64 * 1024)

enum wait_list { WAIT_IDLE, WAIT_HEAD, WAIT_BODY, WAIT_BUSY, WAIT_LINGER, WAIT_WRITE, WAIT_COUNT };

struct http_socket;

struct wait_link {
    struct http_socket *newer, *older;
    int64_t since_ns;
};

struct write_op {
    uv_write_t request;
    struct http_socket *socket;
    struct buf data;
};

struct http_socket {
    struct http_conn conn; /* first: the core hands conns back */
    struct http_server *server;
    uv_tcp_t tcp;
    struct wait_link links[2]; /* state, write */
    struct http_socket *next_dirty;
    struct write_op *write; /* in flight, or NULL */
    size_t write_left;      /* of it unread when it was last looked at */
    int64_t linger_until_ns;
    uint64_t listed_request;
    uint8_t listed; /* enum wait_list of links[0] */
    bool dirty, reading, shut, closing;
};

struct wait_queue {
    struct http_socket *oldest, *newest;
};

struct http_server {
    struct http_core core;
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t timer;
    uv_check_t check;
    uv_prepare_t prepare;
    struct wait_queue waits[WAIT_COUNT];
    struct http_socket *dirty;
    int32_t connections;
    bool listening, stopping, closing;
    int handles; /* of this server's own, still open */
    struct log_rate accept_rate;
    struct write_op *spare; /* one kept for reuse */
    time_t date_s;
    int64_t watched_ns; /* when those that are not read from were last asked whether they left */
    char read_buffer[READ_BYTES];
};

/* A fresh socket in the idle list; the caller accepts into its tcp handle and calls socket_read. */
struct http_socket *socket_open(struct http_server *server, int64_t now_ns);
void socket_close(struct http_socket *socket);
int socket_read(struct http_socket *socket);

/* on_wake of the core: the connection is looked at when the turn ends. */
void socket_woken(struct http_conn *conn);
/* Moves it to the list its state asks for; `fresh` starts its time anew even in the same one. */
void socket_wait(struct http_socket *socket, int64_t now_ns, bool fresh);
/* The end of a turn: everything woken is run and written. */
void sockets_flush(struct http_server *server);
/* Ends what has waited too long, and what nobody waits for any more. */
void sockets_expire(struct http_server *server, int64_t now_ns);

#endif
