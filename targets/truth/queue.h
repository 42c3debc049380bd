/* Connections in order of their next deadline: a binary heap. Equal deadlines in any order. */
#ifndef QUEUE_H
#define QUEUE_H

#include <stddef.h>

struct connection;

struct queue {
    struct connection **items;
    size_t n, capacity;
};

/* `connection->place` is kept up to date; 0 means that it is not queued. */
struct connection *queue_first(const struct queue *queue);
/* Put in, or move to where its `due_ns` belongs now. */
void queue_update(struct queue *queue, struct connection *connection);
void queue_remove(struct queue *queue, struct connection *connection);

#endif
