/* The few things every part needs: the clock, memory that cannot fail, bytes in a row, chance. */
#ifndef BASICS_H
#define BASICS_H

#include <stddef.h>
#include <stdint.h>

#define SECOND_NS UINT64_C(1000000000)

/* CLOCK_MONOTONIC in nanoseconds: every process of a machine shares it, so a client's instants and
 * ours can be subtracted. */
uint64_t now_ns(void);

/* realloc that ends the process instead of returning NULL. */
void *resized(void *memory, size_t size);

/* Grows an array of `size`-byte items to hold at least `needed`, doubling; new items are zero. */
void *grown(void *array, size_t *capacity, size_t needed, size_t size);

/* Bytes waiting to be read or written: `data[start, end)`. */
struct buffer {
    char *data;
    size_t start, end, capacity;
};

size_t buffer_length(const struct buffer *buffer);
/* Room for `size` more bytes after `end`, and a zero behind them. */
char *buffer_reserve(struct buffer *buffer, size_t size);
void buffer_append(struct buffer *buffer, const char *bytes, size_t size);
/* Forget the first `size` bytes. */
void buffer_consume(struct buffer *buffer, size_t size);
void buffer_free(struct buffer *buffer);

/* A number in [0, 1) that depends on its arguments alone, so that the same requests meet the same
 * fate in every run. Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014). */
double chance(uint64_t seed, uint64_t number);

#endif
