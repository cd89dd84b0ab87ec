//! API keys: who a bearer token belongs to, and what that one may still do.
//!
//! [`KeyStore::authenticate`] answers from memory, comparing digests in constant time; [`KeyStore::admit`] takes the
//! per-key limits and gives concurrency back on drop; [`KeyStore::record`] counts usage, which the audit store's writer makes
//! durable. Where keys come from (flags, file, store) is not seen by callers. With no key anywhere everybody is `anonymous`.

mod limits;

pub use crate::audit::Usage;
pub use limits::{Budget, KeyPermit};

use crate::audit::{Act, Actor, AuditHandle, AuditUnavailable, Intent, StoreError, StoredKey};
use crate::config::Secret;
use ernie_proto::admin::{Key, NewKey};
use http::{HeaderMap, header};
use limits::KeyState;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::sync::watch;

/// Who a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Stable id of the key, `anonymous` when no keys are configured.
    pub id: Arc<str>,
    pub name: Arc<str>,
    /// Part of every prefix-cache key of this principal's requests.
    pub cache_salt: u64,
    /// Served names this key may use. `None`: all.
    pub models: Option<Vec<String>>,
    pub scope: Scope,
}

/// What a key is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything the API port offers.
    Inference,
    /// `/metrics` and health only.
    Monitor,
}

impl Scope {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Inference => "inference",
            Self::Monitor => "monitor",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "inference" => Some(Self::Inference),
            "monitor" => Some(Self::Monitor),
            _ => None,
        }
    }
}

/// Why a key was not accepted: 401 in each case, never saying more to the client than "invalid key".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyRefusal {
    #[error("no API key: send it as `Authorization: Bearer KEY`")]
    Missing,
    #[error("the API key is not known")]
    Unknown,
    #[error("the API key has expired")]
    Expired,
    #[error("the API key was revoked")]
    Revoked,
}

impl KeyRefusal {
    /// Word for the metrics.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Unknown => "unknown",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

/// Which limit of a key is used up; 429 with `Retry-After`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the API key's limit of {limit} {what} is used up; try again in {} s", .retry_after.as_secs().max(1))]
pub struct LimitRefusal {
    /// `requests per minute`, `tokens per minute`, `concurrent requests`, `tokens per day`.
    pub what: &'static str,
    pub limit: u64,
    pub retry_after: Duration,
}

/// Why a key was not made or changed.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{0}")]
    Invalid(String),
    #[error("a key named {0:?} exists already; revoke it first, or choose another name")]
    Exists(String),
    #[error("there is no active key {0:?}; `ernie-ctl key list` shows them")]
    NotFound(String),
    #[error(transparent)]
    Audit(#[from] AuditUnavailable),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// One key in memory.
#[derive(Debug)]
struct Entry {
    digest: [u8; 32],
    principal: Principal,
    expires_at: Option<i64>,
    revoked: bool,
    state: Arc<KeyState>,
    stored: Option<StoredKey>,
}

/// All keys at one moment; replaced as a whole.
#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
}

/// The keys. Cheap to clone.
#[derive(Debug, Clone)]
pub struct KeyStore {
    table: watch::Sender<Arc<Table>>,
    audit: AuditHandle,
    anonymous: Arc<(Principal, Arc<KeyState>)>,
}

impl KeyStore {
    /// Reads the stored keys and joins them with the configured ones.
    pub async fn start(configured: &[Secret], audit: &AuditHandle) -> Result<Self, StoreError> {
        let anonymous = Principal {
            id: "anonymous".into(),
            name: "anonymous".into(),
            cache_salt: 0,
            models: None,
            scope: Scope::Inference,
        };
        let store = Self {
            table: watch::Sender::new(Arc::new(Table::default())),
            audit: audit.clone(),
            anonymous: Arc::new((anonymous, Arc::new(KeyState::unlimited()))),
        };
        store.reload(configured).await?;
        Ok(store)
    }

    /// Names of all keys by the number that stands for them in the engine.
    pub fn names(&self) -> HashMap<u64, String> {
        let table = self.table.borrow();
        let known = table.entries.iter().map(|e| &e.principal).chain([&self.anonymous.0]);
        known.map(|p| (p.cache_salt, p.name.to_string())).collect()
    }

    /// Takes configuration and store anew; what keys have used so far stays counted.
    pub async fn reload(&self, configured: &[Secret]) -> Result<(), StoreError> {
        let stored = self.audit.reader().keys().await?;
        let today = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        let used: HashMap<String, u64> = self
            .audit
            .reader()
            .usage(&today)
            .await?
            .into_iter()
            .map(|row| (row.key, u64::try_from(row.prompt_tokens + row.completion_tokens).unwrap_or(0)))
            .collect();
        let before = self.table.borrow().clone();
        let state_of = |id: &str, limits: &ernie_proto::admin::KeyLimits| {
            let kept = before.entries.iter().find(|e| &*e.principal.id == id && e.state.limits() == limits);
            kept.map_or_else(
                || Arc::new(KeyState::new(*limits, &today, used.get(id).copied().unwrap_or(0))),
                |e| Arc::clone(&e.state),
            )
        };
        let mut entries = Vec::new();
        for (index, secret) in configured.iter().enumerate() {
            let digest: [u8; 32] = Sha256::digest(secret.expose().as_bytes()).into();
            let id = format!("config-{}", index + 1);
            entries.push(Entry {
                principal: principal(&id, &id, &digest, None, Scope::Inference),
                digest,
                expires_at: None,
                revoked: false,
                state: state_of(&id, &ernie_proto::admin::KeyLimits::default()),
                stored: None,
            });
        }
        for key in stored {
            let models = (!key.models.is_empty()).then(|| key.models.clone());
            let scope = Scope::parse(&key.scope).unwrap_or(Scope::Monitor);
            entries.push(Entry {
                principal: principal(&key.id, &key.name, &key.hash, models, scope),
                digest: key.hash,
                expires_at: key.expires_at,
                revoked: key.revoked_at.is_some(),
                state: state_of(&key.id, &key.limits),
                stored: Some(key),
            });
        }
        self.table.send_replace(Arc::new(Table { entries }));
        Ok(())
    }

    /// Whether anybody may ask: no key was ever configured or made. A revoked last key does not open the door.
    pub fn is_open(&self) -> bool {
        self.table.borrow().entries.is_empty()
    }

    /// Who a request is from. `x-api-key` is what Anthropic clients send.
    pub fn authenticate(&self, headers: &HeaderMap) -> Result<Principal, KeyRefusal> {
        let table = self.table.borrow().clone();
        if table.entries.is_empty() {
            return Ok(self.anonymous.0.clone());
        }
        let bearer = headers.get(header::AUTHORIZATION).and_then(|v| strip_bearer(v.as_bytes()));
        let key = bearer.or_else(|| headers.get("x-api-key").map(|v| v.as_bytes())).ok_or(KeyRefusal::Missing)?;
        let digest: [u8; 32] = Sha256::digest(key).into();
        let mut found = None;
        // All of them, every time: how long it takes tells nothing.
        for entry in &table.entries {
            if bool::from(entry.digest.ct_eq(&digest)) {
                found = Some(entry);
            }
        }
        let entry = found.ok_or(KeyRefusal::Unknown)?;
        if entry.revoked {
            return Err(KeyRefusal::Revoked);
        }
        if entry.expires_at.is_some_and(|at| at <= jiff::Timestamp::now().as_second()) {
            return Err(KeyRefusal::Expired);
        }
        Ok(entry.principal.clone())
    }

    /// Takes one request of a principal: requests per minute, concurrency, tokens of the day.
    pub fn admit(&self, principal: &Principal) -> Result<KeyPermit, LimitRefusal> {
        KeyState::admit(&self.state_of(principal), jiff::Timestamp::now())
    }

    /// What is left of a principal's requests and tokens of the minute; `None`: no limit.
    pub fn budgets(&self, principal: &Principal) -> [Option<Budget>; 2] {
        self.state_of(principal).budgets()
    }

    /// Counts what a finished request took.
    pub fn record(&self, principal: &Principal, usage: Usage) {
        let today = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
        self.state_of(principal).used(&today, usage.prompt_tokens + usage.completion_tokens);
        self.audit.usage(Arc::clone(&principal.id), usage);
    }

    fn state_of(&self, principal: &Principal) -> Arc<KeyState> {
        let table = self.table.borrow();
        let entry = table.entries.iter().find(|e| e.principal.id == principal.id);
        entry.map_or_else(|| Arc::clone(&self.anonymous.1), |e| Arc::clone(&e.state))
    }

    /// Makes a key; the secret is in this answer and nowhere else.
    pub async fn create(
        &self,
        new: &NewKey,
        actor: Actor,
        role: &'static str,
        configured: &[Secret],
    ) -> Result<(Key, String, i64), KeyError> {
        let scope = check(new)?;
        if self.table.borrow().entries.iter().any(|e| !e.revoked && &*e.principal.name == new.name.as_str()) {
            return Err(KeyError::Exists(new.name.clone()));
        }
        let (key, secret) = mint(new, scope);
        let act = self.begin(actor, role, "key.create", &key).await?;
        let seq = act.seq();
        let result = self.audit.store_key(key.clone()).await;
        self.end(act, &result).await;
        result?;
        self.reload(configured).await?;
        Ok((view(&key, jiff::Timestamp::now().as_second()), secret, seq))
    }

    /// Ends a key at once. `which` is its id or its name.
    pub async fn revoke(
        &self,
        which: &str,
        actor: Actor,
        role: &'static str,
        configured: &[Secret],
    ) -> Result<(Key, i64), KeyError> {
        let mut key = self.find(which)?;
        let act = self.begin(actor, role, "key.revoke", &key).await?;
        let seq = act.seq();
        let now = jiff::Timestamp::now().as_second();
        let result = self.audit.revoke_key(key.id.clone(), now).await;
        self.end(act, &result).await;
        result?;
        key.revoked_at = Some(now);
        self.reload(configured).await?;
        Ok((view(&key, now), seq))
    }

    /// Makes a new key with everything of the old one and ends the old one.
    pub async fn rotate(
        &self,
        which: &str,
        actor: Actor,
        role: &'static str,
        configured: &[Secret],
    ) -> Result<(Key, String, i64), KeyError> {
        let old = self.find(which)?;
        let new = NewKey {
            name: old.name.clone(),
            scope: Some(old.scope.clone()),
            limits: old.limits,
            models: old.models.clone(),
            expires_in_seconds: None,
        };
        let (mut key, secret) = mint(&new, Scope::parse(&old.scope).unwrap_or(Scope::Monitor));
        key.expires_at = old.expires_at;
        let act = self.begin(actor, role, "key.rotate", &old).await?;
        let seq = act.seq();
        let now = jiff::Timestamp::now().as_second();
        let mut result = self.audit.revoke_key(old.id.clone(), now).await;
        if result.is_ok() {
            result = self.audit.store_key(key.clone()).await;
        }
        self.end(act, &result).await;
        result?;
        self.reload(configured).await?;
        Ok((view(&key, now), secret, seq))
    }

    /// All stored keys, without secrets.
    pub fn list(&self) -> Vec<Key> {
        let now = jiff::Timestamp::now().as_second();
        self.table.borrow().entries.iter().filter_map(|e| e.stored.as_ref()).map(|k| view(k, now)).collect()
    }

    fn find(&self, which: &str) -> Result<StoredKey, KeyError> {
        let table = self.table.borrow();
        let mut keys = table.entries.iter().filter(|e| !e.revoked).filter_map(|e| e.stored.as_ref());
        keys.find(|k| k.id == which || k.name == which).cloned().ok_or_else(|| KeyError::NotFound(which.to_owned()))
    }

    async fn begin(
        &self,
        actor: Actor,
        role: &'static str,
        act: &'static str,
        key: &StoredKey,
    ) -> Result<Act, AuditUnavailable> {
        let detail = serde_json::json!({ "id": key.id, "scope": key.scope, "limits": key.limits, "models": key.models, "expires_at": key.expires_at });
        self.audit.begin(Intent { actor, role, act, subject: key.name.clone(), detail }).await
    }

    async fn end(&self, act: Act, result: &Result<(), AuditUnavailable>) {
        act.finish(result.clone().map(|()| serde_json::json!({})).map_err(|e| e.to_string())).await;
    }
}

fn check(new: &NewKey) -> Result<Scope, KeyError> {
    let name_ok = !new.name.is_empty()
        && new.name.len() <= 64
        && new.name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@'));
    if !name_ok {
        return Err(KeyError::Invalid(format!(
            "{:?} can not be a key's name; use up to 64 letters, digits, and - _ . @",
            new.name
        )));
    }
    let scope = new.scope.as_deref().unwrap_or("inference");
    Scope::parse(scope)
        .ok_or_else(|| KeyError::Invalid(format!("there is no scope {scope:?}; use inference or monitor")))
}

/// 256 random bits, `ek-` in front so that scanners for leaked secrets can know them.
fn mint(new: &NewKey, scope: Scope) -> (StoredKey, String) {
    use base64::Engine;
    let bytes: [u8; 32] = rand::random();
    let secret = format!("ek-{}", base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes));
    let hash: [u8; 32] = Sha256::digest(secret.as_bytes()).into();
    let now = jiff::Timestamp::now().as_second();
    let expires = new.expires_in_seconds.map(|s| now.saturating_add(i64::try_from(s).unwrap_or(i64::MAX)));
    let key = StoredKey {
        id: format!("k_{}", &crate::audit::hex(&hash)[..12]),
        name: new.name.clone(),
        scope: scope.as_str().to_owned(),
        hash,
        limits: new.limits,
        models: new.models.clone(),
        created_at: now,
        expires_at: expires,
        revoked_at: None,
    };
    (key, secret)
}

fn view(key: &StoredKey, now: i64) -> Key {
    let state = match (key.revoked_at, key.expires_at) {
        (Some(_), _) => "revoked",
        (None, Some(at)) if at <= now => "expired",
        _ => "active",
    };
    Key {
        id: key.id.clone(),
        name: key.name.clone(),
        scope: key.scope.clone(),
        limits: key.limits,
        models: key.models.clone(),
        created_at: key.created_at,
        expires_at: key.expires_at,
        revoked_at: key.revoked_at,
        state: state.to_owned(),
        last_used_day: None,
    }
}

/// `Bearer` in any case, then blanks, then the key.
fn strip_bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"bearer") || rest.first() != Some(&b' ') {
        return None;
    }
    Some(rest.trim_ascii()).filter(|key| !key.is_empty())
}

/// The salt keeps the prefix caches of two keys apart; it comes from the key's digest, so it is the same after a restart.
fn principal(id: &str, name: &str, digest: &[u8; 32], models: Option<Vec<String>>, scope: Scope) -> Principal {
    let salted = Sha256::digest([b"ernied prefix cache salt".as_slice(), digest].concat());
    let mut salt = [0u8; 8];
    salt.copy_from_slice(&salted[..8]);
    Principal { id: id.into(), name: name.into(), cache_salt: u64::from_le_bytes(salt), models, scope }
}

#[cfg(test)]
mod tests;
