#!/usr/bin/env bash
# Evidence of the papers that one accelerator can give, in slots of at most nine minutes, the most valuable first:
#   bash experiments/gpu.sh            # all slots in this order, then the rows of what they ran
#   bash experiments/gpu.sh sst2       # one slot: steps, batches, sst2, e2e, speeds or search
#   bash experiments/gpu.sh rows       # the rows and pages alone, on any machine that has the folder of runs
# A slot is pieces in order. A piece that finished is not run again, one that was stopped goes on from its last checkpoint, and what the
# time of a slot did not allow is named: the same command goes on with it. Runs have the names of the recipes at full scale, so that pages
# judge and draw them as runs made smaller; every row has the device and the commit. Run nothing beside it.
# DPX_DATA is the folder of data (sst2/, e2e/), MINILM and SMOLLM2 the checkpoints of an encoder and of a decoder: slots that lack theirs
# are left out. OUTPUTS is the folder of runs (outputs), EVIDENCE that of pages (experiments), PYTHON the interpreter, LIMIT_S the seconds
# of a slot. TEXT is a file for the slot `batches`, in place of the text that comes with dpx, of which ten thousand steps are many passes.
# SCALE=hundredth is the rehearsal: the same pieces with some hundredth of the work, for a CPU.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3} limit=${LIMIT_S:-540} scale=${SCALE:-full}
outputs=$(realpath -m "${OUTPUTS:-$here/outputs}") evidence=$(realpath -m "${EVIDENCE:-$here/experiments}")
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" JAX_COMPILATION_CACHE_DIR="$outputs/cache/compiled"
mkdir -p "$outputs/gpu"
cd "$here" || exit 1
papers=() failed=0

device=$("$python" -c 'import jax; print(jax.default_backend(), jax.devices()[0].device_kind)') || exit 1
mesh=single dtype=float32
case $device in
    gpu*H100*) mesh=h100 dtype=bfloat16 ;;
    gpu*) mesh=h200 dtype=bfloat16 ;;
esac
small() { [ "$scale" = hundredth ]; }
sized() { if small; then echo "$2"; else echo "$1"; fi; } # at full size, in the rehearsal

piece() { # name, then the overrides of dpx or, after `--`, another command
    local name="$slot/$1" left=$((limit - (SECONDS - began))) status log
    shift
    log="$outputs/gpu/$name.log"
    [ -e "$outputs/gpu/$name.done" ] && return
    if [ "$left" -lt 10 ]; then
        echo "$name: no time left in this slot; the same command goes on"
        failed=1
        return
    fi
    mkdir -p "$(dirname "$log")"
    case $1 in
        --) shift ;;
        -m) shift && set -- "$python" -m dpx -m "mesh=$mesh" "hydra.sweep.dir=$outputs" "$@" ;;
        *) set -- "$python" -m dpx "mesh=$mesh" "hydra.sweep.dir=$outputs" "$@" ;;
    esac
    echo "$name: at most $left s"
    # A run that is told to stop writes a checkpoint first.
    timeout --signal=TERM --kill-after=30 "$left" "$@" >>"$log" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        touch "$outputs/gpu/$name.done"
    else
        echo "$name: $([ $status -eq 124 ] && echo stopped at the end of the slot || echo "failed with $status")"
        tail -n 3 "$log"
        failed=1
    fi
}

needs() { # what, its path
    [ -n "${2:-}" ] && [ -e "$2" ] && return
    echo "$slot: left out, $1 is not there (${2:-not given})"
    failed=1
    return 1
}

# Private steps over plain ones in both types, with the share of the measured rate of plain products.
steps() {
    local model batch
    for model in $(sized "base tiny large mini small" micro); do
        case $model in tiny | mini) batch=512 ;; small) batch=256 ;; base) batch=128 ;; large) batch=64 ;; micro) batch=2 ;; esac
        piece "$model" name="gpu_$model" "model=$model" task=mlm_nsp data.pairs=same_document job=benchmark \
            "data.sequence_length=$(sized 128 16)" "data.vocabulary.size=$(sized 30522 64)" \
            'benchmark.variants=[plain,book_keeping]' 'benchmark.dtypes=[bfloat16,float32]' "benchmark.logical_batch=$((batch * 2))" \
            "benchmark.physical_batches=[$batch]" "benchmark.rounds=$(sized 7 1)" "benchmark.limit_s=$(sized 100 400)" \
            "hydra.run.dir=$outputs/gpu_$model" "benchmark.output=$evidence/benchmarks/gpu_${model}_128.json"
    done
    papers+=(benchmarks)
}

# Physical batches at one noise-batch ratio, with one rate and with rates of their own, and by a decoder (McKenna's Figures 7, 8, 10).
batches() {
    local source=(data=embedded) size=(model="$(sized tiny micro)" "steps=$(sized 4000 20)" "++model.dtype=$dtype")
    size+=(schedule.evaluate_every="$(sized 2000 10)" schedule.checkpoint_every="$(sized 500 10)")
    size+=(schedule.evaluation_rows="$(sized 2000 16)")
    size+=(data.sequence_length="$(sized 128 32)" data.vocabulary.size="$(sized 30522 256)" data.declared_size=null privacy.delta=1e-6)
    size+=(microbatch="$(sized auto 4)" lr_schedule.warmup_steps="$(sized 400 2)" batch_schedule.size="$(sized 128,512,2048 8,16)")
    [ -n "${TEXT:-}" ] && source=(data=text "data.source.paths=[$TEXT]")
    local masked="task.max_masked_positions=$(sized 20 5)"
    piece one_rate -m +experiment=mckenna_fig7_physical_batch "${source[@]}" "${size[@]}" "$masked" \
        replicate="$(sized 0,1,2 0)" noise.noise_batch_ratio="$(sized 9.5367431640625e-07,3.0517578125e-05,0.0009765625 3.0517578125e-05)"
    piece own_rates -m +experiment=mckenna_fig8_batch_lr "${source[@]}" "${size[@]}" "$masked" \
        lr_schedule.learning_rate="$(sized 0.015625,7.8125e-3,3.90625e-3,1.953125e-3 7.8125e-3)"
    piece decoder -m +experiment=mckenna_fig10_decoder "${source[@]}" "${size[@]}" model="$(sized decoder_tiny decoder_micro)" \
        replicate="$(sized 0,1,2 0)" noise.noise_batch_ratio="$(sized 9.5367431640625e-07,3.0517578125e-05,0.0009765625 3.0517578125e-05)"
    papers+=(mckenna2025)
}

# Du & Mi's Table 2 on SST-2, from a small public encoder.
sst2() {
    needs "SST-2 (DPX_DATA)" "${DPX_DATA:+$DPX_DATA/sst2}" && needs "an encoder (MINILM)" "${MINILM:-}" || return
    local size=(init=hf "init.path=$MINILM" init.provenance=public model=hf model.pool=mean "model.classifier=linear" data=glue_sst2)
    size+=(data.sequence_length="$(sized 128 16)" replicate="$(sized 0,1,2 0)" schedule.evaluation_rows="$(sized 50000 32)")
    size+=(microbatch="$(sized auto 4)" ++model.dtype="$dtype")
    size+=(data.vocabulary.size="$(sed -n 's/.*"vocab_size": *\([0-9]*\).*/\1/p' "$MINILM/config.json")")
    local pass=(steps="$(sized 202 2)" batch_schedule.size="$(sized 1000 10)")
    pass+=(schedule.evaluate_every="$(sized 202 2)" schedule.checkpoint_every="$(sized 101 2)")
    local forward=(schedule.checkpoint_every="$(sized 1000 10)")
    small && forward+=(steps=20 schedule.evaluate_every=20)
    piece private -m +experiment=dpfp_table2_dpsgd_li "${size[@]}" "${pass[@]}" noise.epsilon=3.0,8.0
    piece forward_3 -m +experiment=dpfp_table2_eps3 "${size[@]}" "${forward[@]}"
    piece forward_8 -m +experiment=dpfp_table2_eps8 "${size[@]}" "${forward[@]}"
    piece plain -m +experiment=dpfp_table2_nonprivate "${size[@]}" "${forward[@]}" steps="$(sized 2105 20)"
    piece carriers -m +experiment=dpfp_table2_rgp_li "${size[@]}" "${pass[@]}"
    piece frozen -m +experiment=dpfp_frozen_encoder "${size[@]}" "${forward[@]}"
    papers+=(du2021)
}

# Adapters of a decoder on E2E for three epochs at epsilon 8, 3 and without noise; BLEU of its completions.
e2e() {
    needs "E2E (DPX_DATA)" "${DPX_DATA:+$DPX_DATA/e2e}" && needs "a decoder (SMOLLM2)" "${SMOLLM2:-}" || return
    local name run=() noise
    small && run=(steps=2 batch_schedule.size=8 microbatch=4 schedule.evaluate_every=2 schedule.checkpoint_every=2) &&
        run+=(schedule.evaluation_rows=8)
    export GENERATE OUTPUTS=$outputs PYTHON=$python
    GENERATE=$(sized "generate.batch_size=105" "generate.batch_size=2 generate.limit=4")
    for noise in noise.epsilon=8 noise.epsilon=3 mechanism=none; do
        name=gpu_e2e_${noise//[.=]/_}
        piece "$name" -- bash experiments/e2e/train.sh "$SMOLLM2" "$name" "$noise" "mesh=$mesh" "${run[@]}"
        piece "${name}_score" -- bash -c '"$PYTHON" experiments/e2e/score.py "$0/private/generated/beams_4.jsonl" >"$0/score.json"' \
            "$outputs/$name"
    done
}

# Steps and examples a second: McKenna's Table 4, Yin's Figure 3, Anil's section 5.3.
speeds() {
    local size=(data=embedded data.declared_size=100000 privacy.delta=1e-6)
    size+=(data.sequence_length="$(sized 128 16)" data.vocabulary.size="$(sized 30522 64)")
    local rounds
    rounds=benchmark.rounds=$(sized 9 1)
    piece table_4 -m +experiment=mckenna_table4_throughput "${size[@]}" task.max_masked_positions="$(sized 20 5)" "$rounds" \
        model="$(sized tiny,mini,small,medium,base,large micro)" "$(sized point.tiny=64 +point.micro=2)" ++model.dtype="$dtype" \
        benchmark.limit_s="$(sized 40 400)"
    piece figure_3 +experiment=legal_fig3_runtime model="$(sized base micro)" "$rounds" data.sequence_length="$(sized 128 16)" \
        benchmark.limit_s="$(sized 150 400)" benchmark.physical_batches="$(sized '[1,2,4,8,16,32,64]' '[1,2]')"
    piece overhead +experiment=anil_throughput "${size[@]}" model="$(sized large micro)" "$rounds" \
        ++model.dtype="$dtype" benchmark.limit_s="$(sized 100 400)" benchmark.physical_batches="$(sized '[8,16,32,64]' '[2]')"
    papers+=(mckenna2025 yin2022 anil2021)
}

# Of 265,000 examples, as the text that comes with dpx gives: weight decay alone, then thirty trials over the ranges of Anil et al., with
# higher rates for runs this short.
search() {
    papers+=(anil2021)
    local size=(data=embedded model="$(sized tiny micro)" "++model.dtype=$dtype" microbatch="$(sized auto 4)")
    size+=(batch_schedule.size="$(sized 512 8)")
    size+=(data.sequence_length="$(sized 128 32)" data.vocabulary.size="$(sized 30522 256)" privacy.delta=1e-7)
    size+=(data.declared_size="$(sized 265000 1200000)")
    size+=(task.max_masked_positions="$(sized 20 5)" lr_schedule.warmup_steps="$(sized 200 2)" schedule.evaluation_rows="$(sized 2000 16)")
    piece weight_decay -m +experiment=anil_weight_decay "${size[@]}" steps="$(sized 5000 20)" schedule.evaluate_every="$(sized 1000 10)" \
        schedule.checkpoint_every="$(sized 1000 10)"
    "$python" -c 'import optuna' 2>/dev/null || needs "optuna (the extra tune)" || return
    piece trials -m +experiment=anil_tune_32k "${size[@]}" steps="$(sized 1500 10)" schedule.evaluate_every="$(sized 1500 10)" \
        schedule.checkpoint_every="$(sized 500 10)" "lr_schedule.learning_rate=tag(log, interval(1e-5, 1e-1))" \
        hydra.sweeper.n_trials="$(sized 30 2)"
}

rows() {
    local paper
    for paper in $(printf '%s\n' "${papers[@]}" | sort -u); do
        "$python" -m dpx job=report "report.paper=$paper" "report.outputs=$outputs" "report.evidence=$evidence" || failed=1
    done
}

slots=("${@:-steps batches sst2 e2e speeds search}")
echo "$device, $scale size, runs in $outputs"
for slot in ${slots[*]}; do
    began=$SECONDS
    case $slot in
        steps | batches | sst2 | e2e | speeds | search) "$slot" && echo "$slot: $((SECONDS - began)) s" ;;
        rows) papers=(benchmarks mckenna2025 du2021 yin2022 anil2021) ;;
        *) echo "error: $slot: is no slot. Name steps, batches, sst2, e2e, speeds, search or rows." >&2; exit 2 ;;
    esac
done
rows
exit $failed
