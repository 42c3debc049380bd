#include "basics.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

void *resized(void *memory, size_t size) {
    void *moved = realloc(memory, size);
    if (moved == NULL) {
        fprintf(stderr, "error: out of memory\n");
        exit(1);
    }
    return moved;
}

void *grown(void *array, size_t *capacity, size_t needed, size_t size) {
    if (needed <= *capacity) return array;
    size_t larger = *capacity ? *capacity : 256;
    while (larger < needed) larger *= 2;
    array = resized(array, larger * size);
    memset((char *)array + *capacity * size, 0, (larger - *capacity) * size);
    *capacity = larger;
    return array;
}

size_t buffer_length(const struct buffer *buffer) { return buffer->end - buffer->start; }

char *buffer_reserve(struct buffer *buffer, size_t size) {
    if (buffer->end + size < buffer->capacity) return buffer->data + buffer->end;
    if (buffer->start > 0) {
        memmove(buffer->data, buffer->data + buffer->start, buffer_length(buffer));
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->end + size >= buffer->capacity) {
        size_t larger = buffer->capacity ? buffer->capacity : 4096;
        while (larger <= buffer->end + size) larger *= 2;
        buffer->data = resized(buffer->data, larger);
        buffer->capacity = larger;
    }
    return buffer->data + buffer->end;
}

void buffer_append(struct buffer *buffer, const char *bytes, size_t size) {
    memcpy(buffer_reserve(buffer, size), bytes, size);
    buffer->end += size;
}

void buffer_consume(struct buffer *buffer, size_t size) {
    buffer->start += size;
    if (buffer->start == buffer->end) buffer->start = buffer->end = 0;
}

void buffer_free(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){0};
}

double chance(uint64_t seed, uint64_t number) {
    uint64_t mixed = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) + number;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return (double)(mixed >> 11) * 0x1p-53;
}
