/* What a connection's reply does next. Callers end with `connection_settle`. */
#ifndef REPLY_H
#define REPLY_H

#include "connection.h"

/* Start replies for the requests that have been read, as far as they are whole. */
void reply_to_input(struct server *server, struct connection *connection);

/* Do what is due: a piece of a split write, a burst of tokens, the end. */
void reply_step(struct server *server, struct connection *connection);

/* The kernel takes bytes again. */
void reply_continue(struct server *server, struct connection *connection);

#endif
