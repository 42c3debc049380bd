#include "queue.h"

#include "basics.h"
#include "connection.h"

/* items[0] is unused, so that place 0 can mean "not queued" and the parent of i is i / 2. */

static void put(struct queue *queue, size_t place, struct connection *connection) {
    queue->items[place] = connection;
    connection->place = place;
}

static size_t sift_up(struct queue *queue, size_t place) {
    struct connection *moved = queue->items[place];
    for (; place > 1 && queue->items[place / 2]->due_ns > moved->due_ns; place /= 2)
        put(queue, place, queue->items[place / 2]);
    put(queue, place, moved);
    return place;
}

static void sift_down(struct queue *queue, size_t place) {
    struct connection *moved = queue->items[place];
    for (size_t child; (child = 2 * place) <= queue->n; place = child) {
        if (child < queue->n && queue->items[child + 1]->due_ns < queue->items[child]->due_ns)
            child++;
        if (queue->items[child]->due_ns >= moved->due_ns) break;
        put(queue, place, queue->items[child]);
    }
    put(queue, place, moved);
}

struct connection *queue_first(const struct queue *queue) {
    return queue->n ? queue->items[1] : NULL;
}

void queue_update(struct queue *queue, struct connection *connection) {
    if (connection->place == 0) {
        queue->n++;
        queue->items =
            grown(queue->items, &queue->capacity, queue->n + 1, sizeof(struct connection *));
        put(queue, queue->n, connection);
    }
    sift_down(queue, sift_up(queue, connection->place));
}

void queue_remove(struct queue *queue, struct connection *connection) {
    size_t place = connection->place;
    if (place == 0) return;
    struct connection *last = queue->items[queue->n--];
    connection->place = 0;
    if (last == connection) return;
    put(queue, place, last);
    sift_down(queue, sift_up(queue, place));
}
