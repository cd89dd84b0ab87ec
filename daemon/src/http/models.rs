//! `/v1/models`: what is served, under every name it answers to; during a rollout the candidate as well, with its state.

use super::Api;
use super::error::ApiError;
use crate::keys::Principal;
use crate::supervisor::{DeploymentRole, DeploymentStatus};
use axum::extract::{Path, State};
use axum::{Extension, Json};
use ernie_proto::openai::response::{ModelCard, ModelList, ModelPermission};
use std::sync::Arc;

pub async fn list(State(api): State<Arc<Api>>, Extension(principal): Extension<Principal>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: cards(&api, &principal) })
}

pub async fn one(
    State(api): State<Arc<Api>>,
    Extension(principal): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    let mut cards = cards(&api, &principal);
    match cards.iter().position(|c| c.id == id) {
        Some(at) => Ok(Json(cards.swap_remove(at))),
        None => {
            let served: Vec<String> = cards.into_iter().map(|c| c.id).collect();
            Err(ApiError::model_not_found(&id, &served))
        }
    }
}

fn cards(api: &Api, principal: &Principal) -> Vec<ModelCard> {
    let status = api.fleet.status();
    let created = api.fleet.active().map_or(api.started_unix, |d| d.created);
    let mut deployments: Vec<&DeploymentStatus> = status.deployments.iter().collect();
    // The one that answers first.
    deployments.sort_by_key(|d| d.role != DeploymentRole::Active);
    let mut cards = Vec::new();
    for deployment in deployments {
        let Some(loaded) = &deployment.loaded else { continue };
        let state = match deployment.role {
            DeploymentRole::Active => "serving",
            other => other.as_str(),
        };
        for name in &deployment.served_names {
            let allowed = principal.models.as_ref().is_none_or(|models| models.contains(name));
            if !allowed || cards.iter().any(|c: &ModelCard| &c.id == name && c.revision == deployment.revision) {
                continue;
            }
            let root = deployment.model_dir.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            cards.push(ModelCard {
                id: name.clone(),
                object: "model",
                created,
                owned_by: "ernied",
                root,
                parent: None,
                max_model_len: loaded.max_model_len,
                permission: vec![permission(name, created)],
                revision: deployment.revision.clone(),
                state,
            });
        }
    }
    cards
}

/// A form that old clients expect; it never says anything else.
fn permission(name: &str, created: u64) -> ModelPermission {
    ModelPermission {
        id: format!("modelperm-{name}"),
        object: "model_permission",
        created,
        allow_create_engine: false,
        allow_sampling: true,
        allow_logprobs: true,
        allow_search_indices: false,
        allow_view: true,
        allow_fine_tuning: false,
        organization: "*",
        group: None,
        is_blocking: false,
    }
}
