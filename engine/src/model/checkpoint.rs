//! A model folder's safetensors files: opened once, headers checked, every tensor located and compared with what the model
//! needs. All differences are reported in one list. Reading the tensors' bytes is `weights`.
//!
//! Nothing here allocates after a length that was only read: the parser gets the mapped file and bounds itself by it.

use super::config::ModelConfig;
use super::parameters::{is_known_and_skipped, parameters};
use super::weights::MappedFile;
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The index of the 300B model has about 3 MB.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Why the files of a model folder can not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("{} can not be read: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} holds no weights that can be loaded: {cause}; {remedy}", dir.display())]
    NoWeights { dir: PathBuf, cause: String, remedy: &'static str },
    #[error("{}: {cause}; {remedy}", file.display())]
    Malformed { file: PathBuf, cause: String, remedy: &'static str },
    #[error("the weights in {} do not fit config.json:\n  {}", dir.display(), list(problems))]
    Tensors { dir: PathBuf, problems: Vec<TensorProblem> },
    #[error("{} changed while it was read; load again when the copy is complete", file.display())]
    Changed { file: PathBuf },
    #[error("{}: sha256 is {found}, the manifest says {expected}; copy the file again", file.display())]
    Digest { file: PathBuf, found: String, expected: String },
    #[error("{} is read by the loader and missing in the manifest; seal the folder again", file.display())]
    Unlisted { file: PathBuf },
}

const COPY_AGAIN: &str = "copy the file again from its source";

/// One tensor that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorProblem {
    pub name: String,
    /// The file it is in, or should be in.
    pub file: Option<String>,
    pub kind: TensorProblemKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorProblemKind {
    Missing,
    Unused,
    Duplicated {
        also_in: String,
    },
    WrongShape {
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    WrongDtype {
        found: String,
    },
    /// The index names a file for it that does not hold it.
    NotInItsFile,
    /// It lies in a file, but the index does not name it.
    NotInIndex,
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use TensorProblemKind::*;
        if let Some(file) = &self.file {
            write!(f, "{file}: ")?;
        }
        write!(f, "{} ", self.name)?;
        match &self.kind {
            Missing => write!(f, "is missing; take all shards of one revision"),
            Unused => write!(f, "is not used by this architecture; check that config.json belongs to these weights"),
            Duplicated { also_in } => write!(f, "is also in {also_in}; keep one of the two files"),
            WrongShape { found, expected } => write!(
                f,
                "has shape {found:?}, config.json asks for {expected:?}; check that config.json belongs to these weights"
            ),
            WrongDtype { found } => {
                write!(f, "has type {found}; only BF16, F16 and F32 are implemented: use the bf16 checkpoint")
            }
            NotInItsFile => write!(f, "is not there although {INDEX} says so; take index and shards of one revision"),
            NotInIndex => write!(f, "is not in {INDEX}; take index and shards of one revision"),
        }
    }
}

/// Problems shown in a message; the rest is counted (the error value holds them all).
const PROBLEMS_SHOWN: usize = 20;

fn list(problems: &[TensorProblem]) -> String {
    let mut lines: Vec<_> = problems.iter().take(PROBLEMS_SHOWN).map(ToString::to_string).collect();
    if problems.len() > PROBLEMS_SHOWN {
        lines.push(format!("and {} more", problems.len() - PROBLEMS_SHOWN));
    }
    if problems.iter().any(|p| p.name.starts_with("ernie.")) {
        lines.push("names with ernie. belong to the -Paddle files; use the -PT repository of the model".to_owned());
    } else if problems.iter().any(|p| p.name.ends_with("experts.gate_up_proj")) {
        lines.push("this is a raw state dict of transformers 5; save it with save_pretrained instead".to_owned());
    }
    lines.join("\n  ")
}

/// Element types that can be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    Bf16,
    F16,
    F32,
}

/// Where a tensor lies.
#[derive(Debug, Clone)]
pub(crate) struct TensorAt {
    pub(crate) file: usize,
    /// Bytes in the file.
    pub(crate) range: Range<usize>,
    pub(crate) element: ElementType,
    pub(crate) shape: Vec<usize>,
}

/// A folder's weight files and the tensors that the model takes from them.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) dir: PathBuf,
    pub(crate) files: Vec<MappedFile>,
    /// Every parameter of the model, each exactly once.
    pub(crate) tensors: HashMap<String, TensorAt>,
    /// The index as it was parsed, for its digest.
    pub(crate) index: Option<Vec<u8>>,
}

/// A tensor as a header declares it.
pub(super) struct Declared {
    file: usize,
    pub(super) range: Range<usize>,
    pub(super) dtype: Dtype,
    shape: Vec<usize>,
}

impl Checkpoint {
    /// Opens the weight files of `dir` and checks them against the config.
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let WeightFiles { names, absent, index } = weight_files(dir)?;
        if let Some(absent) = absent.first() {
            let cause = format!("{absent} is named in {INDEX}, but the folder does not have it");
            return Err(CheckpointError::NoWeights { dir: dir.to_path_buf(), cause, remedy: COPY_SHARDS });
        }
        let (mut files, mut headers) = (Vec::new(), Vec::new());
        for name in &names {
            let file = MappedFile::open(&dir.join(name), name)?;
            headers.push(read_header(&file)?);
            files.push(file);
        }
        let (tensors, problems) = locate(config, &names, headers, index.as_ref());
        if !problems.is_empty() {
            return Err(CheckpointError::Tensors { dir: dir.to_path_buf(), problems });
        }
        Ok(Self { dir: dir.to_path_buf(), files, tensors, index: index.map(|i| i.bytes) })
    }

    /// Of a folder whose weights come from elsewhere.
    pub(super) fn empty(dir: &Path) -> Self {
        Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: HashMap::new(), index: None }
    }

    /// Bytes of all tensors that will be read.
    pub fn bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.range.len() as u64).sum()
    }
}

/// Finds every parameter of the model in the files with these headers (in the order of `files`), and everything that does
/// not fit.
pub(super) fn locate(
    config: &ModelConfig,
    files: &[String],
    headers: Vec<Vec<(String, Declared)>>,
    index: Option<&Index>,
) -> (HashMap<String, TensorAt>, Vec<TensorProblem>) {
    let mut declared: BTreeMap<String, Declared> = BTreeMap::new();
    let mut problems = Vec::new();
    for (number, (name, header)) in files.iter().zip(headers).enumerate() {
        for (tensor, mut info) in header {
            info.file = number;
            let problem = |kind| TensorProblem { name: tensor.clone(), file: Some(name.clone()), kind };
            match index.map(|index| index.map.get(&tensor)) {
                None => {}
                Some(Some(home)) if home == name => {}
                Some(Some(home)) => problems.push(problem(TensorProblemKind::Duplicated { also_in: home.clone() })),
                Some(None) if is_known_and_skipped(config, &tensor) => {}
                Some(None) => problems.push(problem(TensorProblemKind::NotInIndex)),
            }
            declared.insert(tensor, info);
        }
    }
    for (tensor, file) in index.into_iter().flat_map(|index| &index.map) {
        if !declared.contains_key(tensor) {
            problems.push(TensorProblem {
                name: tensor.clone(),
                file: Some(file.clone()),
                kind: TensorProblemKind::NotInItsFile,
            });
        }
    }
    let reported: BTreeSet<String> = problems.iter().map(|p: &TensorProblem| p.name.clone()).collect();
    let tensors = choose(config, declared, files, &reported, &mut problems);
    (tensors, problems)
}

/// Matches what is there with what is needed.
fn choose(
    config: &ModelConfig,
    mut declared: BTreeMap<String, Declared>,
    files: &[String],
    reported: &BTreeSet<String>,
    problems: &mut Vec<TensorProblem>,
) -> HashMap<String, TensorAt> {
    let mut chosen = HashMap::new();
    for parameter in parameters(config) {
        let name = parameter.name;
        let Some(tensor) = declared.remove(&name) else {
            if !reported.contains(&name) {
                problems.push(TensorProblem { name, file: None, kind: TensorProblemKind::Missing });
            }
            continue;
        };
        let file = Some(files[tensor.file].clone());
        if !same_shape(&tensor.shape, &parameter.shape) {
            let kind = TensorProblemKind::WrongShape { found: tensor.shape.clone(), expected: parameter.shape };
            problems.push(TensorProblem { name: name.clone(), file: file.clone(), kind });
        }
        let element = match tensor.dtype {
            Dtype::BF16 => ElementType::Bf16,
            Dtype::F16 => ElementType::F16,
            Dtype::F32 => ElementType::F32,
            other => {
                let kind = TensorProblemKind::WrongDtype { found: format!("{other:?}") };
                problems.push(TensorProblem { name, file, kind });
                continue;
            }
        };
        chosen.insert(name, TensorAt { file: tensor.file, range: tensor.range, element, shape: tensor.shape });
    }
    for (name, tensor) in declared {
        if !is_known_and_skipped(config, &name) && !reported.contains(&name) {
            let file = Some(files[tensor.file].clone());
            problems.push(TensorProblem { name, file, kind: TensorProblemKind::Unused });
        }
    }
    chosen
}

/// Equal, but for leading ones: the router's bias is `[1, experts]` on the hub and `[experts]` in some copies.
fn same_shape(a: &[usize], b: &[usize]) -> bool {
    let bare = |s: &[usize]| s.iter().skip_while(|&&d| d == 1).copied().collect::<Vec<_>>();
    bare(a) == bare(b)
}

pub(super) struct Index {
    bytes: Vec<u8>,
    /// Tensor name to file name.
    pub(super) map: BTreeMap<String, String>,
}

/// The weight files of a folder.
pub(super) struct WeightFiles {
    pub(super) names: Vec<String>,
    /// Named by the index and not there.
    pub(super) absent: Vec<String>,
    pub(super) index: Option<Index>,
}

pub(super) const COPY_SHARDS: &str = "copy all shards of the model";

/// Names of the weight files of a folder, and the index when there is one.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles, CheckpointError> {
    let mut present = BTreeSet::new();
    let read = |source| CheckpointError::Read { path: dir.to_path_buf(), source };
    for entry in std::fs::read_dir(dir).map_err(read)? {
        if let Some(name) = entry.map_err(read)?.file_name().to_str() {
            present.insert(name.to_owned());
        }
    }
    match (present.contains(SINGLE), present.contains(INDEX)) {
        (true, false) => Ok(WeightFiles { names: vec![SINGLE.to_owned()], absent: Vec::new(), index: None }),
        (false, true) => {
            let index = read_index(&dir.join(INDEX))?;
            let files: BTreeSet<_> = index.map.values().cloned().collect();
            let (names, absent) = files.into_iter().partition(|file| present.contains(file));
            Ok(WeightFiles { names, absent, index: Some(index) })
        }
        (true, true) => Err(CheckpointError::NoWeights {
            dir: dir.to_path_buf(),
            cause: format!("both {SINGLE} and {INDEX} are there, and only one of them can be the model"),
            remedy: "remove the one that is left over",
        }),
        (false, false) => Err(no_weights(dir, &present)),
    }
}

/// What else lies in a folder without safetensors, and what to do about it.
fn no_weights(dir: &Path, present: &BTreeSet<String>) -> CheckpointError {
    let with = |endings: &[&str]| present.iter().find(|n| endings.iter().any(|e| n.ends_with(e)));
    let (cause, remedy) = if let Some(name) = with(&[".bin", ".pt", ".pth", ".ckpt", ".pkl"]) {
        let cause = format!("{name} is in Python's pickle format, which runs code when it is opened");
        (
            cause,
            "take the model's safetensors files, or convert on a machine without secrets: transformers' save_pretrained",
        )
    } else if let Some(name) = with(&[".safetensors"]) {
        let cause = format!("{name} is neither {SINGLE} nor named by {INDEX}");
        (cause, "copy the index file, or rename a single file to model.safetensors")
    } else if let Some(name) = with(&[".gguf"]) {
        (format!("{name} is a GGUF file, which is not implemented"), "use the safetensors files of the -PT repository")
    } else if let Some(name) = with(&[".pdparams"]) {
        (
            format!("{name} is a Paddle file, which is not implemented"),
            "use the safetensors files of the -PT repository",
        )
    } else {
        (format!("neither {SINGLE} nor {INDEX} is there"), "copy the model's safetensors files into the folder")
    };
    CheckpointError::NoWeights { dir: dir.to_path_buf(), cause, remedy }
}

fn read_index(path: &Path) -> Result<Index, CheckpointError> {
    let malformed = |cause: String| CheckpointError::Malformed { file: path.to_path_buf(), cause, remedy: COPY_AGAIN };
    let read = |source| CheckpointError::Read { path: path.to_path_buf(), source };
    let length = std::fs::metadata(path).map_err(read)?.len();
    if length > INDEX_BYTES_MAX {
        return Err(malformed(format!("{length} bytes are more than an index can have")));
    }
    let bytes = std::fs::read(path).map_err(read)?;
    if is_lfs_pointer(&bytes) {
        return Err(lfs_pointer(path));
    }
    let json: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| malformed(format!("not valid JSON: {e}")))?;
    let Some(weight_map) = json.get("weight_map").and_then(|m| m.as_object()).filter(|m| !m.is_empty()) else {
        return Err(malformed("no weight_map, or an empty one".to_owned()));
    };
    let mut map = BTreeMap::new();
    for (tensor, file) in weight_map {
        // A plain name: an index must not reach out of its folder.
        match file.as_str().filter(|f| f.ends_with(".safetensors") && !f.contains(['/', '\\', '\0'])) {
            Some(file) => map.insert(tensor.clone(), file.to_owned()),
            None => return Err(malformed(format!("{tensor} lies in {file}, which is no file name of a shard"))),
        };
    }
    Ok(Index { bytes, map })
}

fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/spec/")
}

fn lfs_pointer(path: &Path) -> CheckpointError {
    CheckpointError::Malformed {
        file: path.to_path_buf(),
        cause: "a Git LFS pointer, not the file itself".to_owned(),
        remedy: "run `git lfs pull` in the repository, or download the file",
    }
}

/// The tensors that a file declares; their ranges are inside the file, disjoint, and fill it.
pub(super) fn read_header(file: &MappedFile) -> Result<Vec<(String, Declared)>, CheckpointError> {
    let bytes = file.bytes();
    let malformed =
        |cause: String| CheckpointError::Malformed { file: file.path().to_path_buf(), cause, remedy: COPY_AGAIN };
    if is_lfs_pointer(bytes) {
        return Err(lfs_pointer(file.path()));
    }
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| malformed(describe(&e, bytes)))?;
    let data = 8 + header;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let range = data + info.data_offsets.0..data + info.data_offsets.1;
        if bytes.get(range.clone()).is_none() {
            return Err(malformed(format!("{name} ends beyond the end of the file")));
        }
        tensors.push((name, Declared { file: 0, range, dtype: info.dtype, shape: info.shape.clone() }));
    }
    tensors.sort_by_key(|(_, t)| t.range.start);
    Ok(tensors)
}

/// What is wrong with a header, in the words of this file's reader.
fn describe(error: &SafeTensorError, bytes: &[u8]) -> String {
    let length = bytes.len();
    let declared = bytes.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    match error {
        SafeTensorError::HeaderTooSmall => format!("{length} bytes are too few for a safetensors file"),
        SafeTensorError::HeaderTooLarge => {
            format!("header length {declared} is more than the 100 MB a header may have")
        }
        SafeTensorError::InvalidHeaderLength => {
            format!("header length {declared} reaches beyond the end of the file ({length} bytes): the file is cut off")
        }
        SafeTensorError::InvalidHeader(e) => format!("the header is not UTF-8 ({e})"),
        SafeTensorError::InvalidHeaderDeserialization(e) | SafeTensorError::JsonError(e) => {
            format!("the header is not a table of tensors ({e})")
        }
        SafeTensorError::InvalidOffset(name) => {
            format!("{name} overlaps another tensor or leaves a gap (data_offsets)")
        }
        SafeTensorError::TensorInvalidInfo => {
            let name = first_tensor_of_wrong_size(bytes).unwrap_or_else(|| "a tensor".to_owned());
            format!("{name} has another number of bytes than its shape and type say")
        }
        SafeTensorError::ValidationOverflow => "a tensor's shape overflows".to_owned(),
        SafeTensorError::MisalignedSlice => "a tensor does not end at a byte".to_owned(),
        SafeTensorError::MetadataIncompleteBuffer => match end_of_tensors(bytes) {
            Some(end) if end > length => {
                format!("the file has {length} bytes, its tensors need {end}: the file is cut off")
            }
            Some(end) => format!("{} bytes follow the last tensor", length - end),
            None => format!("the tensors do not fill the file's {length} bytes"),
        },
        other => other.to_string(),
    }
}

/// The header as plain JSON, for messages only; the parser found its length to be inside the file.
fn header_json(bytes: &[u8]) -> Option<(usize, serde_json::Map<String, serde_json::Value>)> {
    let header = usize::try_from(u64::from_le_bytes(*bytes.first_chunk::<8>()?)).ok()?;
    let end = header.checked_add(8)?;
    match serde_json::from_slice(bytes.get(8..end)?).ok()? {
        serde_json::Value::Object(map) => Some((end, map)),
        _ => None,
    }
}

fn offsets(tensor: &serde_json::Value) -> Option<(u64, u64)> {
    let offsets = tensor.get("data_offsets")?;
    Some((offsets.get(0)?.as_u64()?, offsets.get(1)?.as_u64()?))
}

fn end_of_tensors(bytes: &[u8]) -> Option<usize> {
    let (start, map) = header_json(bytes)?;
    let end = map.values().filter_map(offsets).map(|o| o.1).max().unwrap_or(0);
    start.checked_add(usize::try_from(end).ok()?)
}

fn first_tensor_of_wrong_size(bytes: &[u8]) -> Option<String> {
    let (_, map) = header_json(bytes)?;
    map.into_iter().find_map(|(name, tensor)| {
        let dtype: Dtype = serde_json::from_value(tensor.get("dtype")?.clone()).ok()?;
        let shape = tensor.get("shape")?.as_array()?;
        let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(d.as_u64()?))?;
        let (start, end) = offsets(&tensor)?;
        let wrong = elements.checked_mul(dtype.bitsize() as u64)? / 8 != end.checked_sub(start)?;
        wrong.then_some(name)
    })
}
