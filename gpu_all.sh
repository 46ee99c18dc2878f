export PYTHONPATH=$PWD:$PWD/studies/src OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=/tmp/ind
mkdir -p $OUT/r; S="python -m fastweights_studies.measure.scaling"; T0=$SECONDS
say() { echo "[$((SECONDS-T0))s] $*"; }
nvidia-smi -L
i=0; for p in gdn-340m pgdn-340m gka-440m palimpsa-d-760m; do CUDA_VISIBLE_DEVICES=$i timeout 80 $S --presets $p --gpus 1 --results $OUT/a$i --limit 75 > $OUT/a$i.log 2>&1 & i=$((i+1)); done; wait; grep -h GPU, $OUT/a?.log $OUT/a?.log | grep GiB | sort -u; say singles
CUDA_VISIBLE_DEVICES=2,3 timeout 100 python -m torch.distributed.run --standalone --nproc-per-node=2 tests/gpu/context_parallel_worker.py $OUT/rows.json > $OUT/worker.log 2>&1 &
W=$!
CUDA_VISIBLE_DEVICES=0 timeout 80 $S --presets gdn-1b --gpus 1 --results $OUT/b0 --limit 75 > $OUT/b0.log 2>&1 & B0=$!
CUDA_VISIBLE_DEVICES=1 timeout 80 $S --presets gdn-340m --gpus 1 --batch 1 --length 32768 --documents 100000000 --steps 10 --results $OUT/b1 --limit 75 > $OUT/b1.log 2>&1 & B1=$!
wait $B0 $B1; say singles2; wait $W; say worker
cat $OUT/a?.log $OUT/b?.log | grep GiB
timeout 60 $S --presets gdn-340m --gpus 4 --ways context-state --batch 1 --length 32768 --documents 100000000 --steps 10 --limit 50 --results $OUT/r > $OUT/c.log 2>&1; grep -E "GiB|failed" $OUT/c.log; say context
timeout 75 $S --presets gdn-340m --gpus 4 --ways DDP,FSDP2 --limit 35 --results $OUT/r > $OUT/d.log 2>&1; grep -E "GiB|failed" $OUT/d.log; say ddp
timeout 120 $S --presets gdn-340m,gka-440m --gpus 4 --ways context-checkpointed --batch 1 --length 262144 --documents 100000000 --warm 2 --steps 3 --limit 60 --results $OUT/r > $OUT/e.log 2>&1; grep -E "GiB|failed" $OUT/e.log; say million
timeout 100 $S --presets gdn-1b --gpus 4 --ways DDP,FSDP2 --limit 45 --results $OUT/r > $OUT/f.log 2>&1; grep -E "GiB|failed" $OUT/f.log; say 1b
timeout 80 $S --presets pgdn-340m,gka-440m,palimpsa-d-760m --gpus 4 --ways DDP --limit 30 --results $OUT/r > $OUT/g.log 2>&1; grep -E "GiB|failed" $OUT/g.log; say others
python - <<'PY'
import json, os
try:
    for k, v in json.load(open(os.environ["OUT"] + "/rows.json")).items():
        print(k, v["alone"], v["divided"], v["float32"], v["same_bits"])
except Exception as e:
    print(e)
PY
