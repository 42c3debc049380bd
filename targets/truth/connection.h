/* One client: what it sent that we have not read yet, what it has not taken yet, and its reply. */
#ifndef CONNECTION_H
#define CONNECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "basics.h"
#include "options.h"
#include "queue.h"
#include "record.h"
#include "wire.h"

enum stage { STAGE_IDLE, STAGE_TOKENS, STAGE_TAIL, STAGE_WHOLE, STAGE_HANG, STAGE_SENDING };

/* A reply on its way. STAGE_SENDING: all of it is in the buffer, not all with the kernel. */
struct reply {
    enum stage stage;
    uint32_t row;
    const struct failure *failure;
    struct reply_text text;
    int token;                       /* the next to be written */
    uint64_t due_ns;                 /* when */
    uint64_t stalled_ns;             /* how long stalls have held it back */
    uint64_t first_mark, last_mark;  /* the first and last token end at this byte of the connection */
    bool closes;
};

struct connection {
    int fd;
    uint32_t number;
    size_t place;            /* in the queue */
    uint64_t due_ns;         /* the queue's key: the next deadline of reply or piece */
    uint64_t piece_due_ns;   /* of the next piece of a split write; 0: none */
    uint64_t n_pieces, n_sent_bytes, arrived_ns;
    int n_requests;
    bool wants_output;       /* the kernel would take no more */
    bool was_told_to_go_on;  /* 100 Continue was sent for the request that is coming in */
    bool is_over;            /* to be closed by `connection_settle` */
    bool is_reset;           /* … with RST instead of FIN */
    struct buffer in, out;
    struct reply reply;
};

struct server {
    const struct options *options;
    struct record *record;
    struct queue queue;
    int epoll;
    uint64_t started_ns;
};

struct connection *connection_open(struct server *server, int fd, uint32_t number);

/* Hand what is in `out` to the kernel: at once, or in seeded pieces. */
void connection_flush(struct server *server, struct connection *connection);

/* Read what came; false when the client has gone. */
bool connection_read(struct connection *connection);

/* After anything was done with a connection: close and free it if it is over, else queue it. */
void connection_settle(struct server *server, struct connection *connection);

#endif
