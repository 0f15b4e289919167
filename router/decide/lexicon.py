"""Words that tell something about a request, in English and Chinese side by side.

English entries are base forms: the regular inflections are added here. Chinese entries are found as
substrings. A word belongs to one category, and each category has both languages, so that the same
request scores alike in both.
"""

PROOF = "proof"
ENGINEERING = "engineering"
ANALYSIS = "analysis"
COMPOSING = "composing"
CODE = "code"
MATHEMATICS = "mathematics"
CONSTRAINT = "constraint"
CONDITION = "condition"
NUMBER = "number"
GREETING = "greeting"
CHORE = "chore"
LOOKUP = "lookup"
NEUTRAL = "neutral"
"""Chinese words that contain a term of another category by accident."""

_ENGLISH: dict[str, str] = {
    PROOF: """prove proof proven derive derivation deduce disprove theorem lemma corollary induction
        contradiction rigorous rigorously irrational axiom converge""",
    ENGINEERING: """refactor debug optimize optimise optimization optimisation implement
        implementation architecture architect design migrate migration deploy deployment benchmark
        parallelize scale scalable scalability concurrency concurrent asynchronous deadlock
        throughput latency distributed microservice microservices replication
        sharding cache caching middleware compiler pipeline bottleneck
        production framework codebase""",
    ANALYSIS: """analyze analyse analysis compare comparison contrast evaluate evaluation critique
        criticize assess assessment discuss argue argument justify elaborate investigate interpret
        synthesize examine propose strategy tradeoff tradeoffs implication
        implications consequences advantages disadvantages pros cons explain detailed
        comprehensive thorough thoroughly systematically reasoning methodology
        hypothesis""",
    COMPOSING: """write essay story poem report article generate create draft blog speech
        outline summary summarize summarise rewrite proposal letter email screenplay novel lyrics
        paragraph paragraphs words""",
    CODE: """code python javascript typescript java sql rust golang html css php kotlin swift bash
        powershell function functions class method api algorithm regex database query schema docker
        kubernetes linux json xml yaml array loop recursion recursive exception thread threads
        async pandas numpy pytorch tensorflow react django flask laravel spring compile compiler
        bug tests endpoint backend frontend server queue c++ c# node nodejs git excel url csv api sdk
        browser html aws azure script app variable string pointer stack""",
    MATHEMATICS: """integral integrate derivative differentiate equation equations polynomial
        integer integers prime primes matrix matrices eigenvalue probability triangle remainder
        divisible fraction numerator denominator angle radius circle perimeter area volume sum
        product ratio percent digit digits factorial modulo vector vertices algebra calculus
        geometry theorem sequence arithmetic geometric logarithm quadratic simplify calculate
        compute solve square cube root roots inequality maximum minimum combinatorics
        permutations multiply divide subtract average median variance""",
    CONSTRAINT: """must exactly least most only each every ensure avoid unless without requirement
        requirements constraint constraints require neither nor except limit within satisfy
        satisfies handle support supports preserve keeping explicitly""",
    CONDITION: """if suppose assume assuming given let then while whereas otherwise
        because therefore hence such""",
    NUMBER: """two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
        hundred thousand million half twice double triple third quarter dozen""",
    GREETING: """hi hello hey thanks thank bye goodbye morning evening welcome okay ok yes
        no sorry cool great nice""",
    CHORE: """translate define definition meaning convert spell synonym antonym remind reminder
        alarm timer weather play song music call text schedule calendar book booking reservation
        appointment balance card bank account pay payment refund transfer order ticket hotel
        restaurant flight address phone price open nearby today tomorrow tonight weekend""",
    LOOKUP: """what who whom whose where when which is are was were do does did can could how""",
}

_CHINESE: dict[str, str] = {
    PROOF: "证明 求证 推导 推断出 定理 引理 推论 归纳法 反证 严格地 严格论证 无理数 公理 收敛",
    ENGINEERING: """重构 调试 优化 实现 架构 设计 迁移 部署 基准测试 性能 并行 扩展 可扩展 并发 异步
        死锁 吞吐 延迟 分布式 微服务 容错 副本 分片 缓存 中间件 编译器 流水线 瓶颈 内存泄漏 线程安全
        生产环境 框架 代码库""",
    ANALYSIS: """分析 比较 对比 评估 评价 批判 讨论 论述 论证 阐述 探讨 解读 考察 提出 策略 权衡 取舍
        影响 后果 优点 缺点 优缺点 利弊 解释 详细 全面 深入 系统地 推理 方法论 假说""",
    COMPOSING: """写 作文 文章 故事 诗 报告 剧本 生成 创作 起草 撰写 博客 演讲 提纲 大纲 摘要 总结
        改写 提案 信 邮件 小说 歌词 段落 字以""",
    CODE: """代码 函数 算法 正则 数据库 查询语句 编程 程序 接口 变量 数组 循环 递归 异常 线程 编译
        单元测试 测试用例 后端 前端 服务器 队列 浏览器 脚本 应用程序 字符串 指针 表格 网址""",
    MATHEMATICS: """积分 导数 求导 方程 多项式 整数 自然数 质数 素数 矩阵 特征值 概率 三角形 余数
        余 整除 分数 分子 分母 角 半径 圆 周长 面积 体积 总和 之和 的和 乘积 比例 百分 位数 数字 阶乘
        向量 顶点 代数 微积分 几何 数列 等差 等比 对数 二次方程 二次函数 化简 计算 求解 求出 解方程 平方 立方 根
        不等式 最大值 最小值 最大 最小 排列 组合 乘 除 减 平均 中位数 方差 算式 小数 倍""",
    CONSTRAINT: """必须 恰好 至少 至多 只能 仅 每个 每次 每一 确保 保证 避免 除非 不得 不能 不要 要求
        限制 约束 不超过 以内 满足 处理 支持 保持 明确 不使用 需要""",
    CONDITION: "如果 假设 假如 已知 设 若 那么 则 当 而 否则 因为 因此 所以 使得",
    NUMBER: """两 三 四 五 六 七 八 九 十 百 千 万 半""",
    GREETING: "你好 您好 谢谢 再见 早上好 晚上好 嗨 好的 好吧 是的 不用 对不起 太好了 哈哈",
    CHORE: """翻译 定义 什么意思 换算 拼写 同义词 反义词 提醒 闹钟 定时 天气 播放 歌 音乐 打电话 短信
        日程 日历 预订 预约 余额 银行 卡 账户 付款 支付 退款 转账 订单 票 酒店 餐馆 餐厅 航班 地址
        电话 价格 营业 附近 周边 今天 明天 今晚 周末""",
    LOOKUP: "什么 谁 哪里 哪儿 哪 何时 几 多少 吗 呢 怎么 是否 可以",
    NEUTRAL: """角色 主角 口角 根据 设置 设备 设施 建设 当然 当地 当时 规则 原则 相信 信息 信用 信任 除了
        乘坐 乘车 减肥 减少了 几乎 而且 卡路里 千万别 写字楼 世界 半夜 谁写 写的 比较适合 比较合适 比较喜欢 比较好 比较高 比较大 比较小 比较多 比较少 比较便宜 比较贵 比较近
        比较远 比较赞 还比较 也比较 都比较 哪个比较 哪家比较 我比较 你比较 大家 万一""",
}


def _inflections(word: str) -> set[str]:
    stem = word.removesuffix("e")
    return {word, word + "s", stem + "ed", stem + "ing", word + word[-1] + "ing"}


ENGLISH: dict[str, str] = {
    form: category
    for category, words in reversed(_ENGLISH.items())
    for word in words.split()
    for form in _inflections(word)
}
"""Category of each English word in every form; an earlier category wins."""

CHINESE: dict[str, str] = {
    word: category for category, words in reversed(_CHINESE.items()) for word in words.split()
}
"""Category of each Chinese term."""

_BY_FIRST: dict[str, list[str]] = {}
for _term in sorted(CHINESE, key=len, reverse=True):
    _BY_FIRST.setdefault(_term[0], []).append(_term)


def chinese_terms(text: str) -> set[str]:
    """Return the terms of `CHINESE` in a text; at each place the longest counts."""
    found = set()
    at = 0
    while at < len(text):
        for term in _BY_FIRST.get(text[at], ()):
            if text.startswith(term, at):
                found.add(term)
                at += len(term)
                break
        else:
            at += 1
    return found


_FUNCTION = """the a an of to in on at for with from by and or but not is are was were be been being am do
    does did have has had will would can could should may might must i me my we us our you your he
    him his she her it its they them their this that these those there here what who which when
    where why how if then than as so no yes all any some more most very just about into over after
    before between up down out off"""

FUNCTION_WORDS = frozenset(_FUNCTION.split())
"""Common English words. A longer Latin text with hardly any of them is not English prose."""
