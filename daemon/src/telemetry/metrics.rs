//! Metrics: one value, several names (three generations of vLLM's, and ours).
//!
//! One method per event; gauges are read from the fleet's status at scrape. The registry is ours, no globals.
