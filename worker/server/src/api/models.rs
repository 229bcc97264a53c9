//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use http::StatusCode;

use crate::app::App;
use crate::error::{ApiError, ErrorType};
use crate::wire::clip;
use crate::wire::response::{Model, ModelList};

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList {
        object: "list",
        data: vec![model(&app)],
    })
}

pub(super) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|_| {
        ApiError::parameter("model", "the name of the model in the URL is not UTF-8")
            .with_code("invalid_utf8")
    })?;
    check(&app, &id)?;
    Ok(Json(model(&app)))
}

/// Refuses a model that is not served.
///
/// # Errors
/// 404 with the name that is served.
pub(super) fn check(app: &App, asked: &str) -> Result<(), ApiError> {
    if asked == app.model.name {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::NOT_FOUND,
        ErrorType::InvalidRequest,
        format!(
            "model '{}' is not served here: this endpoint serves '{}'",
            clip(asked, 100),
            app.model.name
        ),
    )
    .with_param("model")
    .with_code("model_not_found"))
}

fn model(app: &App) -> Model {
    Model {
        id: app.model.name.clone(),
        object: "model",
        created: app.created,
        owned_by: "hearth",
        max_model_len: app.context_length(),
    }
}
