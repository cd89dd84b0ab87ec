//! Reads tensors from the mapped files straight into kernel layout, one tensor (or one fused group) after the other.
//!
//! Pages are given back right after a tensor is packed, so the peak is the packed size plus one tensor. When a manifest is
//! given, a thread hashes the same open files meanwhile; a file that changes between open and end of load is refused, so
//! what was hashed is what serves.

mod mapped;
mod rows;
mod turned;

pub use mapped::MappedFile;
pub use rows::{Embedding, RowKind, Rows};

use super::checkpoint::{Checkpoint, CheckpointError, ElementType, INDEX, TensorAt};
use super::config::ModelConfig;
use super::digest::{Hashing, Manifest};
use super::parameters::parameters;
use super::plan::Form;
use super::prepared::{PREPARED, Prepared, Writer};
use ernie_kernels::{Arrange, Compensation, ComputedRows, Matrix, PackError, Pool, Rotation, RowSource};
use rows::floats;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use turned::{TurnedColumns, turned_row};

/// Why weights could not be brought into memory.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{name} can not be packed: {source}")]
    Pack { name: String, source: PackError },
    #[error("{}: {name}: {cause}; prepare the model again (`ernie-ctl model prepare`)", file.display())]
    Prepared { file: PathBuf, name: String, cause: String },
    #[error("{} can not be written: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{0} was asked for twice, or is not in the parameter list; this is a defect of ernied, please report it")]
    Unclaimed(String),
    #[error("{0} was never read; this is a defect of ernied, please report it")]
    Unread(String),
}

/// Where a matrix stands to the residual stream; tells what to do with it when the stream is turned.
#[derive(Debug, Clone, Copy)]
pub enum Side<'n> {
    /// Reads the stream through an RMS norm with the weights `norm`. `values` turns the outputs of the last part, group by
    /// group.
    Reads { norm: &'n [f32], values: Option<&'n Rotation> },
    /// Adds to the stream. The rotation turns what it reads, group by group.
    Writes(Option<&'n Rotation>),
}

impl<'n> Side<'n> {
    pub fn reads(norm: &'n [f32]) -> Self {
        Self::Reads { norm, values: None }
    }
}

/// What tensors become.
#[derive(Clone, Copy)]
struct Target<'t> {
    form: Form,
    arrange: Arrange,
    side: Side<'t>,
    inputs: Option<&'t Compensation>,
}

/// Hands out each tensor of a checkpoint exactly once, packed or converted; or each item of a prepared folder as it lies.
pub struct Loader<'a> {
    pool: &'a Pool,
    /// Basis of the residual stream, where it is not the checkpoint's.
    rotation: Option<Rotation>,
    /// Whether values and inputs of down projections are turned too.
    turns_inside: bool,
    checkpoint: Checkpoint,
    remaining: HashMap<String, TensorAt>,
    /// Instead of the checkpoint's tensors.
    prepared: Option<Source>,
    /// Writes down what is handed out.
    writer: Option<Writer>,
    bytes_done: u64,
    bytes_total: u64,
    hashing: Option<Hashing>,
    progress: &'a mut dyn FnMut(u64, u64),
}

/// A prepared folder, and the shapes that its items must have.
struct Source {
    prepared: Prepared,
    shapes: HashMap<String, Vec<usize>>,
}

impl Source {
    fn shape(&self, name: &str) -> Result<&[usize], WeightsError> {
        self.shapes.get(name).map(Vec::as_slice).ok_or_else(|| WeightsError::Unclaimed(name.to_owned()))
    }

    /// Rows of all of them together, and columns, which they share.
    fn matrix_shape(&self, names: &[&str]) -> Result<(usize, usize), WeightsError> {
        let mut size = (0, 0);
        for name in names {
            let shape = self.shape(name)?;
            size = (size.0 + shape[0], shape.last().copied().unwrap_or(0));
        }
        Ok(size)
    }

    fn numbers(&self, name: &str) -> Result<usize, WeightsError> {
        Ok(self.shape(name)?.iter().product())
    }
}

impl std::fmt::Debug for Loader<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loader").field("dir", &self.checkpoint.dir).field("remaining", &self.remaining.len()).finish()
    }
}

impl<'a> Loader<'a> {
    /// `progress` is told bytes done and bytes in all. With a manifest, hashing of every file that was or will be read
    /// starts now, on its own threads; `config` is the text of `config.json` as it was parsed.
    pub fn new(
        mut checkpoint: Checkpoint,
        config: &[u8],
        verify: Option<&Manifest>,
        pool: &'a Pool,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, WeightsError> {
        let bytes_total = checkpoint.bytes();
        let remaining = std::mem::take(&mut checkpoint.tensors);
        let hashing = match verify {
            Some(manifest) => {
                let mut small = vec![("config.json", config)];
                small.extend(checkpoint.index.as_ref().map(|index| (INDEX, index.as_slice())));
                Some(Hashing::start(
                    manifest,
                    &checkpoint.dir,
                    &checkpoint.files.iter().collect::<Vec<_>>(),
                    &small,
                    pool.threads(),
                )?)
            }
            None => None,
        };
        Ok(Self::begin(Self {
            pool,
            checkpoint,
            remaining,
            rotation: None,
            turns_inside: false,
            prepared: None,
            writer: None,
            bytes_done: 0,
            bytes_total,
            hashing,
            progress,
        }))
    }

    /// As [`Loader::new`], from a prepared folder.
    pub fn prepared(
        dir: &Path,
        prepared: Prepared,
        (model, config): (&ModelConfig, &[u8]),
        verify: Option<&Manifest>,
        pool: &'a Pool,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Result<Self, WeightsError> {
        prepared.expect_all();
        let hashing = match verify {
            Some(manifest) => {
                let small = [("config.json", config), (PREPARED, prepared.text())];
                Some(Hashing::start(manifest, dir, &prepared.files().collect::<Vec<_>>(), &small, pool.threads())?)
            }
            None => None,
        };
        let shapes = parameters(model).into_iter().map(|parameter| (parameter.name, parameter.shape)).collect();
        Ok(Self::begin(Self {
            pool,
            checkpoint: Checkpoint::empty(dir),
            remaining: HashMap::new(),
            bytes_total: prepared.bytes(),
            rotation: None,
            turns_inside: false,
            prepared: Some(Source { prepared, shapes }),
            writer: None,
            bytes_done: 0,
            hashing,
            progress,
        }))
    }

    fn begin(mut self) -> Self {
        self.tell();
        self
    }

    /// Writes everything that is handed out from now on into a folder in prepared form.
    pub fn write_down(&mut self, writer: Writer) {
        self.writer = Some(writer);
    }

    /// Packing and hashing are one progress: both have to come to their end.
    fn tell(&mut self) {
        let (hashed, to_hash) = self.hashing.as_ref().map_or((0, 0), Hashing::progress);
        (self.progress)(self.bytes_done + hashed, self.bytes_total + to_hash);
    }

    /// From now on matrices are turned so that they work on a residual stream in this basis; with `inside` also on turned
    /// values and products.
    pub fn rotate(&mut self, rotation: Rotation, inside: bool) {
        (self.rotation, self.turns_inside) = (Some(rotation), inside);
    }

    /// What turns values, or products, in groups of `width`.
    pub fn turn_inside(&self, width: usize) -> Option<Arc<Rotation>> {
        self.turns_inside.then(|| Arc::new(Rotation::new(width)))
    }

    /// Whether matrices come as they were packed before.
    pub fn is_prepared(&self) -> bool {
        self.prepared.is_some()
    }

    pub fn pool(&self) -> &'a Pool {
        self.pool
    }

    fn claim(&mut self, name: &str) -> Result<TensorAt, WeightsError> {
        self.remaining.remove(name).ok_or_else(|| WeightsError::Unclaimed(name.to_owned()))
    }

    /// Packs one or more tensors as one matrix.
    pub fn matrix(
        &mut self,
        form: Form,
        arrange: Arrange,
        side: Side<'_>,
        names: &[&str],
    ) -> Result<Matrix, WeightsError> {
        self.matrix_for(form, arrange, side, names, None)
    }

    /// As `matrix`, rounded for known inputs when there are some.
    pub fn matrix_for(
        &mut self,
        form: Form,
        arrange: Arrange,
        side: Side<'_>,
        names: &[&str],
        inputs: Option<&Compensation>,
    ) -> Result<Matrix, WeightsError> {
        if let Some(source) = &mut self.prepared {
            let shape = source.matrix_shape(names)?;
            let matrix = source.prepared.matrix(form, arrange, names, shape)?;
            self.took(matrix.prepared_bytes());
            return Ok(matrix);
        }
        let tensors = names.iter().map(|name| self.claim(name)).collect::<Result<Vec<_>, _>>()?;
        let target = Target { form, arrange, side, inputs };
        let matrix = self.pack(target, names[0], &tensors)?;
        tensors.iter().for_each(|t| self.done(t));
        if let Some(writer) = &mut self.writer {
            writer.matrix(names, &matrix)?;
        }
        Ok(matrix)
    }

    fn pack(&self, target: Target<'_>, name: &str, parts: &[TensorAt]) -> Result<Matrix, WeightsError> {
        let Target { form, arrange, side, inputs } = target;
        let columns = parts[0].shape.last().copied().unwrap_or(0);
        parts.iter().for_each(|t| self.checkpoint.files[t.file].expect(&t.range));
        let sources: Vec<_> = parts.iter().map(|t| self.rows(t)).collect();
        let pack = |sources: &[RowSource<'_>]| {
            match inputs {
                None => Matrix::pack_with(self.pool, form.weights, form.acts, columns, sources, arrange),
                Some(inputs) => {
                    let Form { weights, acts } = form;
                    Matrix::pack_compensated(self.pool, weights, acts, columns, sources, arrange, inputs)
                }
            }
            .map_err(|source| WeightsError::Pack { name: name.to_owned(), source })
        };
        let heights = || parts.iter().map(|t| t.shape[0]);
        match (&self.rotation, side) {
            (None, _) => pack(&sources),
            (Some(rotation), Side::Reads { norm, values }) => {
                let last = sources.len() - 1;
                let turned = values.map(|values| {
                    TurnedColumns::new(self.pool, values, None, sources[last], (parts[last].shape[0], columns))
                });
                let read_turned = turned.as_ref().map(|turned| |row: usize, out: &mut [f32]| turned.read(row, out));
                let mut sources = sources;
                if let Some(read) = &read_turned {
                    sources[last] = RowSource::Rows(ComputedRows { n: parts[last].shape[0], read });
                }
                let reads: Vec<_> = sources.iter().map(|source| turned_row(rotation, norm, *source)).collect();
                let rows = |(n, read)| RowSource::Rows(ComputedRows { n, read: read as _ });
                pack(&heights().zip(&reads).map(rows).collect::<Vec<_>>())
            }
            (Some(rotation), Side::Writes(inputs)) => {
                let turned: Vec<_> = sources
                    .iter()
                    .zip(heights())
                    .map(|(source, n)| TurnedColumns::new(self.pool, rotation, inputs, *source, (n, columns)))
                    .collect();
                let reads: Vec<_> =
                    turned.iter().map(|t| move |row: usize, out: &mut [f32]| t.read(row, out)).collect();
                let rows = |(n, read)| RowSource::Rows(ComputedRows { n, read: read as _ });
                pack(&heights().zip(&reads).map(rows).collect::<Vec<_>>())
            }
        }
    }

    fn rows(&self, tensor: &TensorAt) -> RowSource<'_> {
        let bytes = &self.checkpoint.files[tensor.file].bytes()[tensor.range.clone()];
        match tensor.element {
            ElementType::Bf16 => RowSource::Bf16(bytes),
            ElementType::F16 => RowSource::F16(bytes),
            ElementType::F32 => RowSource::F32(bytes),
        }
    }

    /// A small tensor (norm, router) in f32, whatever its type in the file.
    pub fn vector(&mut self, name: &str) -> Result<Vec<f32>, WeightsError> {
        if let Some(source) = &mut self.prepared {
            let values = source.prepared.vector(name, source.numbers(name)?)?;
            self.took(values.len() * 4);
            return Ok(values);
        }
        let tensor = self.claim(name)?;
        let values: Vec<f32> = floats(self.rows(&tensor)).collect();
        self.done(&tensor);
        if let Some(writer) = &mut self.writer {
            writer.vector(name, &values)?;
        }
        Ok(values)
    }

    /// The weights that a norm has left: all ones where they went into the matrices that read through it.
    pub fn norm_left(&self, norm: Vec<f32>) -> Vec<f32> {
        if self.rotation.is_some() { vec![1.0; norm.len()] } else { norm }
    }

    /// A small matrix in f32 (router) that reads the stream through a norm.
    pub fn reader(&mut self, name: &str, norm: &[f32]) -> Result<Vec<f32>, WeightsError> {
        if self.prepared.is_some() || self.rotation.is_none() {
            return self.vector(name);
        }
        // What is written down are the turned values.
        let writer = self.writer.take();
        let values = self.vector(name);
        self.writer = writer;
        let mut values = values?;
        if let Some(rotation) = &self.rotation {
            for row in values.chunks_exact_mut(norm.len()) {
                row.iter_mut().zip(norm).for_each(|(value, norm)| *value *= norm);
                rotation.turn(row);
            }
        }
        if let Some(writer) = &mut self.writer {
            writer.vector(name, &values)?;
        }
        Ok(values)
    }

    /// The embedding: packed as the tied head, which reads through `norm`, when `head` says so; row by row otherwise; or both.
    pub fn embedding(
        &mut self,
        name: &str,
        head: Option<Form>,
        norm: &[f32],
        keep_rows: Option<RowKind>,
    ) -> Result<Embedding, WeightsError> {
        if let Some(source) = &mut self.prepared {
            let shape = source.matrix_shape(&[name])?;
            let head = match head {
                Some(form) => Some(source.prepared.matrix(form, Arrange::Concat, &[name], shape)?),
                None => None,
            };
            let rows = match keep_rows {
                Some(kind) => Some(source.prepared.rows(name, kind, shape.0 * shape.1)?),
                None => None,
            };
            self.took(head.as_ref().map_or(0, Matrix::prepared_bytes) + rows.as_ref().map_or(0, Rows::bytes));
            return Ok(Embedding { head, rows });
        }
        let tensor = self.claim(name)?;
        let head = match head {
            Some(form) => {
                let target = Target { form, arrange: Arrange::Concat, side: Side::reads(norm), inputs: None };
                Some(self.pack(target, name, std::slice::from_ref(&tensor))?)
            }
            None => None,
        };
        let rows = keep_rows.map(|kind| match &self.rotation {
            None => Rows::read(kind, self.rows(&tensor)),
            Some(rotation) => Rows::turned(self.pool, kind, rotation, self.rows(&tensor), tensor.shape[0]),
        });
        self.done(&tensor);
        if let Some(writer) = &mut self.writer {
            head.as_ref().map_or(Ok(()), |head| writer.matrix(&[name], head))?;
            rows.as_ref().map_or(Ok(()), |rows| writer.rows(name, rows))?;
        }
        Ok(Embedding { head, rows })
    }

    fn took(&mut self, bytes: usize) {
        self.bytes_done += bytes as u64;
        self.tell();
    }

    fn done(&mut self, tensor: &TensorAt) {
        self.checkpoint.files[tensor.file].release(&tensor.range);
        self.took(tensor.range.len());
    }

    /// Every parameter was taken, every digest is right, and no file changed meanwhile. Gives back the writer.
    pub fn finish(mut self) -> Result<Option<Writer>, WeightsError> {
        let left_over = self.prepared.as_ref().and_then(|source| source.prepared.left_over());
        if let Some(name) = self.remaining.keys().map(String::as_str).min().or(left_over) {
            return Err(WeightsError::Unread(name.to_owned()));
        }
        while self.hashing.as_ref().is_some_and(|hashing| !hashing.is_over()) {
            self.tell();
            std::thread::sleep(HASHING_BEAT);
        }
        if let Some(hashing) = self.hashing.take() {
            hashing.finish()?;
        }
        let prepared = self.prepared.iter().flat_map(|source| source.prepared.files());
        for file in self.checkpoint.files.iter().chain(prepared) {
            file.unchanged()?;
        }
        Ok(self.writer.take())
    }
}

/// Between two signs that hashing goes on after everything is packed.
const HASHING_BEAT: std::time::Duration = std::time::Duration::from_millis(5);
