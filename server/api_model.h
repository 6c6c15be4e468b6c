/* api_model.h: routes that speak of the model and its tokens, and of the running requests by name. The loop thread. */
#ifndef QUIRE_SERVER_API_MODEL_H
#define QUIRE_SERVER_API_MODEL_H

#include "server/app.h"
#include "server/job.h"

/* vLLM's /tokenize and /detokenize; job_fn. */
int api_tokenize(const struct ask_view *view, const char *body, size_t bytes, struct buf *out, bool *chat,
                 struct err *err);
int api_detokenize(const struct ask_view *view, const char *body, size_t bytes, struct buf *out, bool *chat,
                   struct err *err);

void api_models(struct app *app, struct http_exchange *exchange);      /* GET /v1/models */
void api_model(struct app *app, struct http_exchange *exchange);       /* GET /v1/models/{id} */
void api_tgi_info(struct app *app, struct http_exchange *exchange);    /* GET /info, as TGI */
void api_model_info(struct app *app, struct http_exchange *exchange);  /* GET /model_info, as SGLang */
void api_load(struct app *app, struct http_exchange *exchange);        /* GET /load, as vLLM */
void api_abort(struct app *app, struct http_exchange *exchange);       /* POST /abort_request, as SGLang */
void api_cache_reset(struct app *app, struct http_exchange *exchange); /* POST /reset_prefix_cache, /flush_cache */

#endif
