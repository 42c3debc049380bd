/* From the bytes on a connection to what was asked. HTTP/1.1 with a content-length only. */
#ifndef REQUEST_H
#define REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum route { ROUTE_COMPLETION, ROUTE_MODELS, ROUTE_HEALTH, ROUTE_UNKNOWN };

struct request {
    enum route route;
    size_t length;              /* head and body, bytes */
    int64_t seq;                /* -1 without x-seq */
    bool is_chat, is_streamed, wants_usage, wants_running_usage, closes;
    int output_tokens;          /* 0: not said */
    int prompt_tokens;          /* a quarter of the prompt's characters, and a template's 8 */
    char model[96];             /* raw JSON characters */
};

enum parsed { PARSED_WHOLE, PARSED_PARTLY, PARSED_PARTLY_EXPECTS, PARSED_UNFIT };

/* PARSED_PARTLY: more bytes are needed; …_EXPECTS: and the client waits for 100 Continue;
 * PARSED_UNFIT: not a request that this server reads. */
enum parsed parse_request(const char *bytes, size_t size, struct request *request);

#endif
