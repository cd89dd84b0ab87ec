//! The daemon: HTTP, admission, supervision, control plane, audit, telemetry; and the worker role.
//!
//! Arrows point down (docs/architecture.md): `app` knows everyone; `http` and `admin` turn bytes into domain and back;
//! `generate` knows a request's whole way; `supervisor` owns the workers; `config`, `system`, `telemetry` are leaves.
//! `worker` stands aside: it is the only room that names the engine; only `main` and `offline` (work on model folders without
//! a daemon) import it.

pub mod app;
pub mod cli;

pub mod admin;
pub mod http;

pub mod generate;

pub mod admission;
pub mod supervisor;
pub mod text;

pub mod audit;
pub mod keys;
pub mod model_store;

pub mod config;
pub mod system;
pub mod telemetry;

pub mod offline;
pub mod worker;
