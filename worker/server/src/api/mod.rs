//! The HTTP side: routes, and the middleware that every request passes through.

mod body;
mod chat;
mod completions;
mod create;
mod models;
mod prepare_limiter;
mod room;
mod status;
mod stream;

pub(crate) use prepare_limiter::Work;

use std::sync::Arc;

use axum::Router;
use axum::extract::{Extension, MatchedPath, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hearth_transport::spans::SpanContext;
use hearth_transport::trace_context::{self, TRACEPARENT, TRACESTATE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use uuid::Uuid;

use crate::app::App;
use crate::connection::Late;
use crate::cors;
use crate::error::{ApiError, ErrorType};
use crate::generation;

const ROUTES: &str =
    "GET /v1/models, POST /v1/chat/completions, POST /v1/completions, GET /health, GET /ready";

/// All routes of a gateway.
pub(crate) fn router(app: Arc<App>) -> Router {
    let api = Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(create::create::<chat::Chat>))
        .route(
            "/v1/completions",
            post(create::create::<completions::Completions>),
        )
        .route_layer(middleware::from_fn_with_state(app.clone(), authorise));
    let cors = cors::layer(&app.cors_origins);
    let router = Router::new()
        .merge(api)
        .route("/health", get(status::health))
        .route("/ready", get(status::ready))
        .route("/metrics", get(status::metrics_are_elsewhere))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(prepare_limiter::PrepareLimiter::new()))
        .layer(middleware::from_fn_with_state(app.clone(), observe))
        .with_state(app);
    match cors {
        // Outermost: a browser's preflight request carries no key.
        Some(cors) => router.layer(cors),
        None => router,
    }
}

/// Routes of the metrics port.
pub(crate) fn metrics_router(app: Arc<App>) -> Router {
    Router::new()
        .route("/metrics", get(status::metrics))
        .route("/metrics/watch", get(status::watch))
        .with_state(app)
}

/// Context of a request for its handlers, besides its body.
#[derive(Clone)]
pub(crate) struct Context {
    /// Unique part of the answer's id; also the `x-request-id` header of the response.
    pub(crate) id: String,
    /// The client's span, if it has a trace.
    pub(crate) trace: Option<SpanContext>,
}

/// Gives the request its id, counts the response and logs it.
async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let id = Uuid::new_v4().simple().to_string();
    let trace = trace_of(request.headers());
    let route = match request.extensions().get::<MatchedPath>() {
        Some(path) => path.as_str().to_owned(),
        None => "other".to_owned(),
    };
    let method = request.method().clone();
    request.extensions_mut().insert(Context {
        id: id.clone(),
        trace: trace.clone(),
    });
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    app.metrics.response(&route, status);
    tracing::debug!(
        request = %id,
        %method,
        route,
        status,
        trace = trace.map(|trace| tracing::field::display(trace.trace_id())),
        "request"
    );
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// Admits requests with a valid key, except on connections that were opened after the shutdown began.
async fn authorise(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if request.extensions().get::<Late>().is_some() {
        return generation::closing_error().into_response();
    }
    match app.keys.as_ref().map(|keys| keys.check(request.headers())) {
        Some(Err(error)) => error.into_response(),
        _ => next.run(request).await,
    }
}

/// Reads the client's trace context.
fn trace_of(headers: &HeaderMap) -> Option<SpanContext> {
    let parent = headers.get(TRACEPARENT);
    let states = headers.get_all(TRACESTATE).iter();
    trace_context::read(
        parent.and_then(|parent| parent.to_str().ok()),
        states.filter_map(|state| state.to_str().ok()),
    )
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    let path = crate::wire::clip(uri.path(), 100);
    ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorType::InvalidRequest,
        format!("there is no {method} {path}: this endpoint has {ROUTES}"),
    )
    .with_code("unknown_url")
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let path = crate::wire::clip(uri.path(), 100);
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        ErrorType::InvalidRequest,
        format!("{path} does not accept {method}: this endpoint has {ROUTES}"),
    )
    .with_code("method_not_allowed")
}
