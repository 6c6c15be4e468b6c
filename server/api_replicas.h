/* api_replicas.h: what an operator asks of the engines behind the front. The loop thread. */
#ifndef QUIRE_SERVER_API_REPLICAS_H
#define QUIRE_SERVER_API_REPLICAS_H

#include "server/app.h"

void api_replicas(struct app *app, struct http_exchange *exchange);        /* GET /admin/replicas */
void api_replica_restart(struct app *app, struct http_exchange *exchange); /* POST /admin/replicas/{i}/restart */

#endif
