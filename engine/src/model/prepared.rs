//! A model folder in prepared form: weights in kernel layout, so that a load is a mapping and a hash, and packs nothing.
//!
//! ```text
//! prepared.json            layout version, weight plan, and where each item lies
//! weights-00001.ernie …    the items, each at a multiple of 64 bytes
//! config.json, tokenizer…  as in the folder it was made from
//! ```
//!
//! [`Writer`] hangs on a [`Loader`](super::weights::Loader) and writes down whatever the model takes from it; [`Prepared`]
//! hands the same things out again, by the same names. Every length is checked against the file before it is used.

use super::checkpoint::CheckpointError;
use super::plan::{Form, Turn, WeightPlan};
use super::weights::{MappedFile, RowKind, Rows, WeightsError};
use ernie_kernels::memory::MappedBytes;
use ernie_kernels::{ActKind, Arrange, KvKind, Matrix, WeightKind};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Its presence makes a folder a prepared one.
pub const PREPARED: &str = "prepared.json";
/// Of `prepared.json` and of what items are made of. Matrices carry the layout of their panels themselves.
const VERSION: u32 = 1;
/// The 300B model has about 70 000 items of 150 bytes.
const PREPARED_BYTES_MAX: u64 = 64 << 20;
/// A new file is begun after this, so that several threads can hash.
const FILE_BYTES: u64 = 256 << 20;
const ALIGNMENT: u64 = 64;

const PREPARE_AGAIN: &str = "prepare the model again (`ernie-ctl model prepare`)";

/// Where items lie.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    version: u32,
    plan: Plan,
    files: Vec<String>,
    items: Vec<Item>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Item {
    /// The tensors it was made of, joined by `+`; rows of an embedding end in `#rows`.
    name: String,
    file: usize,
    offset: u64,
    bytes: u64,
}

/// A [`WeightPlan`] in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    linear: String,
    down: String,
    experts: String,
    experts_down: String,
    head: String,
    embedding: String,
    kv: String,
    /// Whether the residual stream is turned.
    #[serde(default)]
    rotated: bool,
    /// Whether values and inputs of down projections are turned too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    turned_inside: bool,
}

impl Plan {
    fn of(plan: &WeightPlan) -> Self {
        Self {
            linear: form_word(plan.linear),
            down: form_word(plan.down),
            experts: form_word(plan.experts),
            experts_down: form_word(plan.experts_down),
            head: form_word(plan.head),
            embedding: match plan.embedding {
                RowKind::Bf16 => "bf16".to_owned(),
                RowKind::F32 => "f32".to_owned(),
            },
            kv: match plan.kv {
                KvKind::Bf16 => "bf16".to_owned(),
                KvKind::F32 => "f32".to_owned(),
                KvKind::Int8 => "int8".to_owned(),
            },
            rotated: plan.turn != Turn::Nothing,
            turned_inside: plan.turn == Turn::All,
        }
    }

    fn read(&self) -> Option<WeightPlan> {
        Some(WeightPlan {
            linear: form(&self.linear)?,
            down: form(&self.down)?,
            experts: form(&self.experts)?,
            experts_down: form(&self.experts_down)?,
            head: form(&self.head)?,
            embedding: match self.embedding.as_str() {
                "bf16" => RowKind::Bf16,
                "f32" => RowKind::F32,
                _ => return None,
            },
            kv: match self.kv.as_str() {
                "bf16" => KvKind::Bf16,
                "f32" => KvKind::F32,
                "int8" => KvKind::Int8,
                _ => return None,
            },
            turn: match (self.rotated, self.turned_inside) {
                (false, false) => Turn::Nothing,
                (true, false) => Turn::Stream,
                (true, true) => Turn::All,
                (false, true) => return None,
            },
        })
    }
}

/// `bf16`, `int8/i8g128`, `int4g128zp/i8`.
fn form_word(form: Form) -> String {
    let weights = match form.weights {
        WeightKind::F32 => "f32".to_owned(),
        WeightKind::Bf16 => "bf16".to_owned(),
        WeightKind::Int8 => "int8".to_owned(),
        WeightKind::Int8Group { group } => format!("int8g{group}"),
        WeightKind::Int4 { group, zero_point } => format!("int4g{group}{}", if zero_point { "zp" } else { "" }),
    };
    let acts = match form.acts {
        ActKind::F32 => "f32",
        ActKind::Bf16 => "bf16",
        ActKind::I8 => "i8",
        ActKind::I8Group128 => "i8g128",
    };
    format!("{weights}/{acts}")
}

fn form(word: &str) -> Option<Form> {
    let (weights, acts) = word.split_once('/')?;
    let group = |digits: &str| digits.parse().ok().filter(|group| [32, 64, 128].contains(group));
    let weights = match weights {
        "f32" => WeightKind::F32,
        "bf16" => WeightKind::Bf16,
        "int8" => WeightKind::Int8,
        other => match (other.strip_prefix("int8g"), other.strip_prefix("int4g")) {
            (Some(digits), _) => WeightKind::Int8Group { group: group(digits)? },
            (_, Some(rest)) => WeightKind::Int4 {
                group: group(rest.strip_suffix("zp").unwrap_or(rest))?,
                zero_point: rest.ends_with("zp"),
            },
            _ => return None,
        },
    };
    let acts = match acts {
        "f32" => ActKind::F32,
        "bf16" => ActKind::Bf16,
        "i8" => ActKind::I8,
        "i8g128" => ActKind::I8Group128,
        _ => return None,
    };
    weights.accepts(acts).then_some(Form { weights, acts })
}

/// Writes the weight files and `prepared.json` of a folder.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    table: Table,
    current: Option<BufWriter<File>>,
    /// Bytes in the current file.
    at: u64,
}

impl Writer {
    /// `dir` exists and holds nothing of ours.
    pub fn new(dir: &Path, plan: &WeightPlan) -> Self {
        let table = Table { version: VERSION, plan: Plan::of(plan), files: Vec::new(), items: Vec::new() };
        Self { dir: dir.to_path_buf(), table, current: None, at: 0 }
    }

    pub(super) fn matrix(&mut self, names: &[&str], matrix: &Matrix) -> Result<(), WeightsError> {
        self.item(names.join("+"), |out| matrix.write_to(out), matrix.prepared_bytes() as u64)
    }

    pub(super) fn vector(&mut self, name: &str, values: &[f32]) -> Result<(), WeightsError> {
        let write = |out: &mut BufWriter<File>| values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes()));
        self.item(name.to_owned(), write, values.len() as u64 * 4)
    }

    pub(super) fn rows(&mut self, name: &str, rows: &Rows) -> Result<(), WeightsError> {
        let write = |out: &mut BufWriter<File>| match rows {
            Rows::F32(values) => values.iter().try_for_each(|value| out.write_all(&value.to_le_bytes())),
            other => out.write_all(other.bf16_bytes()),
        };
        self.item(format!("{name}#rows"), write, rows.bytes() as u64)
    }

    fn item(
        &mut self,
        name: String,
        write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
        bytes: u64,
    ) -> Result<(), WeightsError> {
        if self.current.is_none() || self.at >= FILE_BYTES {
            self.end_file()?;
            self.begin_file()?;
        }
        let path = self.path();
        let failed = |source| WeightsError::Write { path: path.clone(), source };
        let Some(out) = &mut self.current else { unreachable!("a file was begun above") };
        write(out).map_err(failed)?;
        let padding = bytes.next_multiple_of(ALIGNMENT) - bytes;
        out.write_all(&[0; ALIGNMENT as usize][..padding as usize]).map_err(failed)?;
        self.table.items.push(Item { name, file: self.table.files.len() - 1, offset: self.at, bytes });
        self.at += bytes + padding;
        Ok(())
    }

    fn path(&self) -> PathBuf {
        self.dir.join(self.table.files.last().map_or(PREPARED, String::as_str))
    }

    fn begin_file(&mut self) -> Result<(), WeightsError> {
        self.table.files.push(format!("weights-{:05}.ernie", self.table.files.len() + 1));
        let path = self.path();
        let file = File::create_new(&path).map_err(|source| WeightsError::Write { path, source })?;
        (self.current, self.at) = (Some(BufWriter::with_capacity(1 << 20, file)), 0);
        Ok(())
    }

    fn end_file(&mut self) -> Result<(), WeightsError> {
        let Some(out) = self.current.take() else { return Ok(()) };
        let path = self.path();
        let failed = |source| WeightsError::Write { path: path.clone(), source };
        out.into_inner().map_err(|error| failed(error.into_error()))?.sync_all().map_err(failed)
    }

    /// Everything is on the disk; the bytes of all weights.
    pub fn finish(mut self) -> Result<u64, WeightsError> {
        self.end_file()?;
        let path = self.dir.join(PREPARED);
        let failed = |source| WeightsError::Write { path: path.clone(), source };
        let text = serde_json::to_vec(&self.table).map_err(|error| failed(error.into()))?;
        let mut file = File::create_new(&path).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed)?;
        Ok(self.table.items.iter().map(|item| item.bytes).sum())
    }
}

/// A prepared folder, mapped.
#[derive(Debug)]
pub struct Prepared {
    files: Vec<Arc<MappedFile>>,
    plan: WeightPlan,
    items: HashMap<String, Item>,
    /// `prepared.json` as it was read, for its digest.
    text: Vec<u8>,
}

impl Prepared {
    /// `None`: the folder is no prepared one.
    pub fn open(dir: &Path) -> Result<Option<Self>, CheckpointError> {
        let path = dir.join(PREPARED);
        let length = match std::fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CheckpointError::Read { path, source }),
        };
        let malformed = |cause: String| CheckpointError::Malformed { file: path.clone(), cause, remedy: PREPARE_AGAIN };
        if length > PREPARED_BYTES_MAX {
            return Err(malformed(format!("{length} bytes are more than it can have")));
        }
        let text = std::fs::read(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
        let table: Table = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
        if table.version != VERSION {
            return Err(malformed(format!("it is of version {}, this ernied reads {VERSION}", table.version)));
        }
        let plan = table.plan.read().ok_or_else(|| malformed("its weight forms are unknown".to_owned()))?;
        let mut files = Vec::new();
        for name in &table.files {
            // A plain name: the table must not reach out of its folder.
            if !name.ends_with(".ernie") || name.contains(['/', '\\', '\0']) {
                return Err(malformed(format!("{name:?} is no name of a weight file")));
            }
            files.push(Arc::new(MappedFile::open(&dir.join(name), name)?));
        }
        let mut items = HashMap::new();
        for item in table.items {
            let length = files.get(item.file).map_or(0, |file| file.length());
            let end = item.offset.checked_add(item.bytes).filter(|end| *end <= length);
            if end.is_none() || !item.offset.is_multiple_of(ALIGNMENT) {
                return Err(malformed(format!("{} lies outside its file, which was cut or exchanged", item.name)));
            }
            items.insert(item.name.clone(), item);
        }
        Ok(Some(Self { files, plan, items, text }))
    }

    pub fn plan(&self) -> &WeightPlan {
        &self.plan
    }

    /// Bytes of all items.
    pub fn bytes(&self) -> u64 {
        self.items.values().map(|item| item.bytes).sum()
    }

    /// Names and lengths of the weight files.
    pub(super) fn sizes(&self) -> Vec<(String, u64)> {
        self.files().map(|file| (file.name().to_owned(), file.length())).collect()
    }

    /// How many items there are.
    pub(super) fn items(&self) -> usize {
        self.items.len()
    }

    pub(super) fn files(&self) -> impl Iterator<Item = &MappedFile> {
        self.files.iter().map(|file| &**file)
    }

    pub(super) fn text(&self) -> &[u8] {
        &self.text
    }

    /// Asks the kernel to read everything.
    pub(super) fn expect_all(&self) {
        self.files().for_each(|file| file.expect(&(0..file.bytes().len())));
    }

    /// Takes the matrix of these tensors: `rows` by `columns`.
    pub(super) fn matrix(
        &mut self,
        form: Form,
        arrange: Arrange,
        names: &[&str],
        (rows, columns): (usize, usize),
    ) -> Result<Matrix, WeightsError> {
        let name = names.join("+");
        let item = self.take(&name)?;
        let file = &self.files[item.file];
        let owner: MappedBytes = Arc::clone(file) as MappedBytes;
        let misfit =
            |cause: String| WeightsError::Prepared { file: file.path().to_path_buf(), name: name.clone(), cause };
        let offset = usize::try_from(item.offset).unwrap_or(usize::MAX);
        let (matrix, bytes) = Matrix::from_mapped(&owner, offset).map_err(|error| misfit(error.to_string()))?;
        let fits = bytes as u64 == item.bytes
            && (matrix.n(), matrix.k()) == (rows, columns)
            && (matrix.kind(), matrix.act_kind(), matrix.arrange()) == (form.weights, form.acts, arrange);
        if fits {
            Ok(matrix)
        } else {
            Err(misfit(format!("it is no {rows} by {columns} matrix of {}", form_word(form))))
        }
    }

    /// Takes a vector of `length` numbers.
    pub(super) fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, WeightsError> {
        let bytes = self.plain(name, length, 4)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Takes the rows of an embedding, `numbers` in all.
    pub(super) fn rows(&mut self, name: &str, kind: RowKind, numbers: usize) -> Result<Rows, WeightsError> {
        let key = format!("{name}#rows");
        match kind {
            RowKind::F32 => self.vector(&key, numbers).map(Rows::F32),
            RowKind::Bf16 => {
                let item = self.items.get(&key).cloned();
                let range = {
                    let bytes = self.plain(&key, numbers, 2)?;
                    bytes.len()
                };
                let item = item.ok_or(WeightsError::Unclaimed(key))?;
                let start = usize::try_from(item.offset).unwrap_or(usize::MAX);
                Ok(Rows::Mapped { file: Arc::clone(&self.files[item.file]), range: start..start + range })
            }
        }
    }

    fn plain(&mut self, name: &str, numbers: usize, width: usize) -> Result<&[u8], WeightsError> {
        let item = self.take(name)?;
        let file = &self.files[item.file];
        // Inside the file: `open` checked it.
        let start = usize::try_from(item.offset).unwrap_or(usize::MAX);
        let bytes = &file.bytes()[start..][..usize::try_from(item.bytes).unwrap_or(usize::MAX)];
        if bytes.len() == numbers * width {
            return Ok(bytes);
        }
        let cause = format!("it has {} bytes, {} are needed", bytes.len(), numbers * width);
        Err(WeightsError::Prepared { file: file.path().to_path_buf(), name: name.to_owned(), cause })
    }

    fn take(&mut self, name: &str) -> Result<Item, WeightsError> {
        let missing = || WeightsError::Prepared {
            file: PathBuf::from(PREPARED),
            name: name.to_owned(),
            cause: "it is missing".to_owned(),
        };
        self.items.remove(name).ok_or_else(missing)
    }

    /// A name that nobody took.
    pub(super) fn left_over(&self) -> Option<&str> {
        self.items.keys().map(String::as_str).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_survive_being_written_down() {
        for name in ["f32", "bf16", "int8-ag", "int8g32", "int4g128-ag", "int4g64zp-dg-h16", "int8-r", "int8-rr"] {
            let plan = WeightPlan::parse(name).expect("a plan");
            assert_eq!(Plan::of(&plan).read(), Some(plan), "{name}");
        }
        for word in ["", "int8", "int3/i8", "int4g100/i8", "bf16/i8", "int8/bf16"] {
            assert_eq!(form(word), None, "{word}");
        }
    }
}
